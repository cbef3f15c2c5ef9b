"""A bridge derived from an excerpt of a long conversation is the bridge derived from the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.proxies.desk import bridges_of

from rollbook.ingest.tokens.bridge import Bridges, NoBridge, bridge, excerpt
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.store.errors import RequestError

from .test_real_templates import ONE_OF_EACH

TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


class _Talk:
    """A conversation as it is drawn; every text in it is another."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw, self._count = draw, 0
        self._often = draw(st.sampled_from([0, 2, 10]))  # of ten turns, how many reason
        self._odd = draw(st.booleans())

    def text(self) -> str:
        self._count += 1
        shapes = ["said {}", "", "\n{}\n ", "<think>{}</think>x"] if self._odd else ["said {}"]
        return str(self._draw(st.sampled_from(shapes))).format(self._count)

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def answer(self, **more: Any) -> dict[str, Any]:
        thinks = self._often > self._draw(st.integers(0, 9))
        thought = {"reasoning_content": f"hm {self._count}"} if thinks else {}
        return {"role": "assistant", "content": self.text()} | thought | more

    def step(self) -> list[dict[str, Any]]:
        calls = []
        for _ in range(self._draw(st.integers(1, 2))):
            self._count += 1
            function = {"name": "look", "arguments": f'{{"what": "thing {self._count}"}}'}
            calls.append({"id": f"call{self._count:05d}", "type": "function", "function": function})
        results = [{"role": "tool", "tool_call_id": c["id"], "content": self.text()} for c in calls]
        return [self.answer(tool_calls=calls), *results]

    def steps(self) -> list[dict[str, Any]]:
        return [m for _ in range(self._draw(st.sampled_from([0, 0, 1, 4, 9]))) for m in self.step()]


@st.composite
def conversations(draw: Callable[[Any], Any]) -> tuple[list[Any], Any, list[Any]]:
    """(request, reply, new messages), as agents have them."""
    talk = _Talk(draw)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        messages += [talk.user(), *talk.steps(), talk.answer()]
    messages += [talk.user(), *talk.steps()]
    if draw(st.booleans()):
        reply, *new = talk.step()
        return messages, reply, [*new, *([talk.user()] if draw(st.booleans()) else [])]
    return messages, talk.answer(), [talk.user()]


@pytest.fixture(scope="module", params=["one of each", pytest.param("all", marks=pytest.mark.more)])
def tested(request: pytest.FixtureRequest, templates: dict[str, str]) -> set[str]:
    """Names of real templates: one of each family, and a family's that keeps count; or all."""
    names = {name for name in templates if not name.endswith("_training")}
    return names if request.param == "all" else names & set(ONE_OF_EACH)


@pytest.fixture(scope="module")
def excerpted(real_chat: Callable[[str], ChatTokenizer], tested: set[str]) -> list[ChatTokenizer]:
    """Those of them whose bridges may be derived from excerpts."""
    bridges = [bridges_of(real_chat(name)) for name in sorted(tested)]
    assert [b.refused for b in bridges] == [None] * len(bridges)
    return [b.tokenizer for b in bridges if b.by_excerpt]


def test_excerpts_serve_with_most_templates(
    excerpted: list[ChatTokenizer], tested: set[str], templates: dict[str, str]
) -> None:
    """Three keep count of what came long before (DeepSeek's), or refuse it (Cohere's), and are found out."""
    served = {t.template_digest for t in excerpted}
    left_out = {n for n in tested if _digest(templates[n]) not in served}
    assert left_out == {"cohere2", "deepseek_r1_distill", "deepseekv3"} & tested != set()


def _digest(source: str) -> str:

    return hashlib.sha256(source.encode()).hexdigest()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, NoBridge) or isinstance(right, NoBridge):
        return isinstance(left, NoBridge) and isinstance(right, NoBridge) and left.reason == right.reason
    return bool(np.array_equal(left, right))


# The same conversations each time: excerpts are claimed for what agents have, not for all that can be drawn.
@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(conversations())
def test_an_excerpt_gives_the_bridge_of_the_whole(
    excerpted: list[ChatTokenizer], conversation: tuple[list[Any], Any, list[Any]]
) -> None:
    """With every template that claims it, for conversations of every shape."""
    messages, reply, new = conversation
    short = excerpt(messages, new)
    if len(short) == len(messages):
        return
    for tokenizer in excerpted:
        try:
            tokenizer.render(messages, TOOLS, generate=True)
        except RequestError:
            continue  # such a request was refused, so it has no turn
        last = tokenizer.stop_ids[0]
        bridges = [bridge(tokenizer, history, reply, new, TOOLS, last) for history in (messages, short)]
        assert _same(*bridges), tokenizer.template_source


@settings(max_examples=100)
@given(conversations())
def test_an_excerpt_is_of_the_conversation(conversation: tuple[list[Any], Any, list[Any]]) -> None:
    """Its messages are the conversation's own, in order; the last thing the user said is among them."""
    messages, _, new = conversation
    short = excerpt(messages, new)
    rest = iter(messages)
    assert all(any(message is other for other in rest) for message in short)
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    assert messages[last] in short
    if any(m["role"] == "user" for m in new):
        assert short[-len(messages[last:]) :] == messages[last:]
    else:
        assert short[-1] is messages[last]
    assert [m for m in messages if m["role"] == "system"] == [m for m in short if m["role"] == "system"]


def test_a_conversation_without_a_user_is_whole() -> None:
    """Nothing says what may be left out."""
    messages = [{"role": "tool", "content": str(i)} for i in range(30)]
    assert excerpt(messages, [{"role": "tool", "content": "x"}]) == messages


# The check at run time -----------------------------------------------------------------------------


@dataclass
class _Told:
    """A parent of so many messages."""

    messages: list[Any]
    reply: dict[str, Any]
    ids: Any
    cut: bool = False

    def conversation(self) -> list[Any]:
        return [*self.messages, self.reply]


COUNTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.index > 30 %}late{% endif %} {{ m.content }}"
    "<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""Messages behind the thirtieth are written otherwise, which no trial is long enough to show."""

REFUSING = (
    "{% if messages|length > 36 %}{{ raise_exception('too long') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def _talk(turns: int) -> list[Any]:
    pairs = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
        for i in range(turns)
    ]
    return [*(m for pair in pairs for m in pair), {"role": "user", "content": "now"}]


def _bridges(chat: Any, source: str) -> Bridges:
    bridges = Bridges.tested(replace(chat(), template=compile_template(source), template_source=source))
    bridges.by_excerpt = True  # as if the trial had not been long enough
    return bridges


def _between(bridges: Bridges, turns: int) -> Any:
    parent = _Told(_talk(turns), {"role": "assistant", "content": "then"}, [bridges.tokenizer.stop_ids[0]])
    new = [{"role": "user", "content": "more"}]
    whole = bridge(bridges.tokenizer, parent.messages, parent.reply, new, None, int(parent.ids[-1]))
    result = bridges.between(parent, parent.conversation(), new, None, {})
    return result if isinstance(result, NoBridge) else result.ids, whole


def test_a_long_conversation_is_compared_with_the_whole(chat: Callable[[str], ChatTokenizer]) -> None:
    """Each time it has doubled; where the two differ the whole is right, and excerpts are given up."""
    bridges = _bridges(chat, COUNTING)
    for turns in range(14):
        result, whole = _between(bridges, turns)
        assert _same(result, whole)
        assert bridges.by_excerpt
    for turns in range(14, 40):
        result, whole = _between(bridges, turns)
        if bridges.by_excerpt:  # not due yet
            assert turns < 16
        else:
            assert _same(result, whole)
            assert "late" in bridges.tokenizer.decode(result, special=True)
    assert not bridges.by_excerpt


def test_a_template_that_refuses_the_whole_alone_is_found_out(chat: Callable[[str], ChatTokenizer]) -> None:
    """A bridge on one side and none on the other is a difference as well."""
    bridges = _bridges(chat, REFUSING)
    reasons = []
    for turns in range(40):
        result, _ = _between(bridges, turns)
        reasons.append(result.reason if isinstance(result, NoBridge) else None)
    assert not bridges.by_excerpt
    assert reasons[-1] == "template_refuses"
    assert reasons[0] is None


def test_excerpts_stay_where_they_agree(chat: Any) -> None:
    """A template that looks at nothing but its messages keeps them, however long the conversation."""
    bridges = Bridges.tested(chat())
    assert bridges.by_excerpt
    for turns in (0, 3, 7, 8, 15, 16, 31, 32, 63, 64):
        result, whole = _between(bridges, turns)
        assert _same(result, whole)
    assert bridges.by_excerpt
