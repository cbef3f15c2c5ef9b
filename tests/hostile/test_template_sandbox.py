# ruff: noqa: E501  (a template is a line)
"""A hostile chat template ends in an error, soon and in little memory; a sound one renders as by Jinja."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollbook.ingest.tokens import sandbox
from rollbook.ingest.tokens.chat_template import compile_template

MEMORY = 2 << 30


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little time, and no more memory than two gigabytes beyond what there is."""
    monkeypatch.setattr(sandbox, "RENDER_S", 1.0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _render(source: str, **given: Any) -> str:
    template = compile_template(source)
    with sandbox.budget():
        return template.render(messages=[{"role": "user", "content": "hi"}], **given)


R = "range(99999)"
FOREVER = {
    "loops in loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% for c in {R} %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "with a filter": f"{{% for a in {R} if a > 5 %}}{{% for b in {R} if b < 0 %}}{{% endfor %}}{{% endfor %}}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(400) }}",
    "calls": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "operators": f"{{% set ns = namespace(x=1) %}}{{% for a in {R} %}}{{% for b in {R} %}}{{% set ns.x = ns.x + 1 %}}{{% endfor %}}{{% endfor %}}",
}
HUGE = {
    "text times a number": "{{ 'a' * 10 ** 10 }}",
    "a list times a number": "{{ [1] * 10 ** 10 }}",
    "times a variable": "{% set n = 10 ** 10 %}{{ n * messages[0].content }}",
    "a range": "{{ range(10 ** 9) | list }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for a in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='aa') %}{% for a in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='aa') %}{% for a in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling without a loop": "{% set x = 'aaaaaaaa' %}" + "{% set x = x ~ x ~ x ~ x %}" * 24 + "{{ x }}",
    "doubling by a block": "{% set x = 'aaaaaaaa' %}"
    + "{% set x %}{{ x }}{{ x }}{{ x }}{{ x }}{% endset %}" * 24,
    "doubling by join": "{% set ns = namespace(x='aa') %}{% for a in range(64) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "replace": "{% set x = 'a' * 10 ** 7 %}{{ x | replace('a', x) }}",
    "a method's replace": "{% set x = 'a' * 10 ** 7 %}{{ x.replace('a', x) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "a method's center": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(width) if false else 'a'.ljust(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "tojson": "{{ [[1]] | tojson(indent=10 ** 10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format with a star": "{{ '%*d' % (10 ** 10, 1) }}",
    "a filter's format": "{{ '%10000000000d' | format(1) }}",
    "a method's format": "{{ '{:10000000000}'.format(1) }}",
    "a nested format": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "what it puts out": "{% for a in range(99999) %}{{ 'a' * 10 ** 6 }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.mark.parametrize("name", FOREVER)
def test_no_template_runs_for_ever(name: str) -> None:
    """Loops, macros and calls end with the time they have."""
    begun = time.thread_time()
    with pytest.raises((SecurityError, RecursionError)):
        _render(FOREVER[name])
    assert time.thread_time() - begun < 40


@pytest.mark.parametrize("name", HUGE)
def test_no_template_fills_the_memory(name: str) -> None:
    """What would be too large is refused before it is made."""
    with pytest.raises((TemplateError, OverflowError)):
        _render(HUGE[name])


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages|tojson).__class__.__base__.__subclasses__() }}",
    "{{ joiner.__init__.__globals__.os.popen('true').read() }}",
    "{{ strftime_now.__code__ }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_reaches_python(source: str) -> None:
    """Attributes that lead out of the sandbox are refused, or are nothing."""
    try:
        text = _render(source)
    except TemplateError as error:
        text = str(error)
    assert text == "" or "unsafe" in text or "undefined" in text or "has no attribute" in text


def test_no_template_changes_what_it_is_given() -> None:
    """Lists and dicts of the request stay as they are."""
    with pytest.raises(SecurityError):
        _render("{{ messages.append(1) }}")


SOUND = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ 1 }}{{ loop.index }}{{ loop.last }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% else %}none{% endfor %}",
    "{% macro f(a, b='x') %}{{ a * 2 }}{{ b }}{% endmacro %}{{ f('y') }}{{ f(b=1, a='z') }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x | upper | replace('A', 'c') | indent(2) }}",
    "{% for a in [[1, [2]], [3]] recursive %}<{{ loop(a) if a is iterable and a is not string else a }}>{% endfor %}",
    "{% for a in range(9) if a % 2 %}{% if a == 7 %}{% break %}{% endif %}{{ a }}{% endfor %}",
    "{{ '%05d' % 3 }}{{ '{:>8}'.format('x') }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ none }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}{{ ns.n }}",
    "{{ 'a{12345}b'.split('b') }}{{ 'x{% raw %}%99999{% endraw %}'.strip() }}{{ 'abc'[1:] }}{{ 'a,b'.split(',') | first }}",
)


@pytest.mark.parametrize("source", SOUND)
def test_a_sound_template_is_rendered_as_ever(source: str) -> None:
    """Byte for byte what Jinja's own sandbox makes of it."""
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a {12345} %99999d"}]
    with sandbox.budget():
        ours = compile_template(source).render(messages=messages)
    assert ours == plain.from_string(source).render(messages=messages)
