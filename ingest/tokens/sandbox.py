"""The sandbox in which a model's chat template runs: bounded in time and in what it makes.

A template is a program that came with a model. Jinja's sandbox keeps it from Python's insides, but lets it
loop for ever, and multiply a text until memory is full. Here every pass of a loop and every call is counted
against a budget of time, and what makes a value larger than its parts is asked first how large it would be.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 20.0
"""CPU seconds that one rendering may take; a conversation of a million tokens takes a few."""
LARGEST = 64 << 20
"""Most characters of a text, and items of a list, that a template may make."""
WIDTH = 10_000
"""Largest number that pads or fills may be given: it multiplies what is made."""
BITS = 4096
"""Largest integer, in bits."""
STEPS = 1024
"""So many steps are taken between two looks at the clock."""
_WIDE = re.compile(r"[%:{][^%{}]*?(?:\*|\d{5})")
"""A format that pads to five digits of characters, or to as many as it is given."""
_COUNTED, _JOINED = "_rollbook_counted", "_rollbook_joined"


class Unbounded(SecurityError):
    """A template would take, or make, more than any conversation needs."""


@dataclass(slots=True)
class _Budget:
    """What is left of one rendering."""

    end: float
    steps: int = 0

    def spend(self) -> None:
        """One step more.

        Raises:
            Unbounded: it is over.
        """
        self.steps += 1
        if self.steps % STEPS == 0 and time.thread_time() > self.end:
            raise Unbounded(f"it takes longer than {RENDER_S:g} s")


_ENDLESS = _Budget(float("inf"))
_budget: ContextVar[_Budget] = ContextVar("budget")


class budget:
    """Let templates take RENDER_S, all in all, while the context lasts."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _budget.set(_Budget(time.thread_time() + RENDER_S))

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


def _spend() -> None:
    _budget.get(_ENDLESS).spend()


def _counted(values: Any) -> Iterator[Any]:
    """The values of a loop, each a step."""
    spend = _budget.get(_ENDLESS).spend
    for value in values:
        spend()
        yield value


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise Unbounded(f"it would make a value of {size:,} characters or items")


def _joined(parts: Iterable[Any]) -> str:
    """The parts as one text, unless that is too large: each could be the one before, doubled."""
    spend = _budget.get(_ENDLESS).spend
    texts: list[str] = []
    size = 0
    for part in parts:
        spend()
        text = str(part)
        texts.append(text)
        size += len(text)
        if size > LARGEST:
            _check_size(size)
    return "".join(texts)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Has loops counted, and `~` measured."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        """A loop over the counted values."""
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
        """A filter that joins."""
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, bounded.

    Args:
        filters: beyond Jinja's, or in their place.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)  # bodies of macros and of `set` blocks

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        extensions: Sequence[Any] = [_GenerationBlock, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        del self.globals["lipsum"]
        every = {**self.filters, **filters}
        self.filters = {name: _bounded(name, function) for name, function in every.items()}
        self.filters |= {_COUNTED: _counted, _JOINED: _joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed = super()._parse(source, name, filename)
        tree: jinja2.nodes.Template = _Instrument().visit(parsed)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja has it, which looks for an attribute of a dict first, and then for its item."""
        if type(obj) is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The value of an operator, unless it is too large.

        Raises:
            Unbounded: it is.
        """
        _spend()
        if operator == "+" and type(left) is str and type(right) is str:
            _check_size(len(left) + len(right))
            return left + right
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, within the bounds.

        Raises:
            Unbounded, SecurityError: it would make something too large, or may not be called.
        """
        _spend()
        receiver = getattr(
            getattr(called, "__wrapped__", called), "__self__", None
        )  # format is wrapped by Jinja
        if isinstance(receiver, str):
            _check_arguments(called.__name__, receiver, (*args, *kwargs.values()))
        return super().call(context, called, *args, **kwargs)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to be asked for too much. What Jinja marks it with is kept."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        _spend()
        values = [arg for arg in args if not isinstance(arg, _MACHINERY)]
        _check_arguments(name, values[0] if values else None, (*values[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return functools.update_wrapper(bounded, function)


_MACHINERY = (jinja2.Environment, jinja2.nodes.EvalContext, jinja2.runtime.Context)
_PADDING = frozenset(
    {"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson"}
)
"""Methods and filters that make as much as a number says."""
_FORMATS = frozenset({"format", "format_map"})


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        _check_size(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > BITS:
            raise Unbounded(f"it would make an integer of more than {BITS} bits")
    elif operator == "*":
        times = right if isinstance(right, int) else left if isinstance(left, int) else 0
        _check_size(times * max(_size(left), _size(right)))


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise Unbounded("it formats to a width of thousands of characters")


def _check_join(*values: Any) -> None:
    """What joins and what is joined, whichever comes first: a method's or a filter's."""
    separator = max((len(value) for value in values if isinstance(value, str)), default=0)
    for parts in values:
        if isinstance(parts, list | tuple):
            _check_size(sum(map(_size, parts)) + separator * len(parts))


def _check_arguments(name: str, receiver: Any, values: Sequence[Any]) -> None:
    """Whether a method or filter of a value is asked for something far larger than the value."""
    largest = 0
    for value in values:
        if isinstance(value, int) and value > WIDTH and (name in _PADDING or name in _FORMATS):
            raise Unbounded(f"{name} of {value}: a width or a count is at most {WIDTH}")
        largest = max(largest, _size(value))
    if name == "join":
        _check_join(receiver, *values)
    elif largest > WIDTH and _size(receiver) > WIDTH:
        _check_size(_size(receiver) * largest)
    if name in _FORMATS and isinstance(receiver, str):
        _check_format(receiver)
