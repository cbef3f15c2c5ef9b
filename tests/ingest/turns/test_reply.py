"""Replies: from sampled ids to the message a client gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.reply import Reply, ReplyReader
from rollbook.store.events import token_ids

Chat = Callable[..., ChatTokenizer]
TOOLS = [{"type": "function", "function": {"name": "calc"}}]


@pytest.fixture(scope="module")
def read(chat: Chat) -> Callable[..., Reply]:
    """Reads a reply from its text."""

    def read_text(text: str, finish: str = "stop", *, tools: bool = True, turn: str = "t1") -> Reply:
        tokenizer = chat()
        ids = [*tokenizer.encode(text), *(tokenizer.stop_ids[:1] if finish == "stop" else ())]
        return ReplyReader(tokenizer, FAMILIES["hermes"], TOOLS if tools else None).reply(
            token_ids(ids), finish, turn
        )

    return read_text


def _calls(reply: Reply) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in reply.message["tool_calls"]]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_text_is_the_content(read: Callable[..., Reply]) -> None:
    """Plain text goes out as it was sampled, white space and all, without the end-of-turn token."""
    reply = read("  Sunny.\n\n")
    assert reply == Reply({"role": "assistant", "content": "  Sunny.\n\n"}, "stop", [])


def test_an_immediate_stop_is_empty_content(read: Callable[..., Reply]) -> None:
    """A completion of one end-of-turn token says nothing, which is allowed."""
    assert read("") == Reply({"role": "assistant", "content": ""}, "stop", [])


def test_a_call_has_openais_form(read: Callable[..., Reply]) -> None:
    """Type, function and arguments as a JSON string; the finish reason says tool_calls."""
    reply = read('<tool_call>\n{"name": "calc", "arguments": {"b": 1, "a": [2.0]}}\n</tool_call>')
    assert reply.finish_reason == "tool_calls"
    assert reply.message["content"] is None
    (call,) = reply.message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "calc", "arguments": '{"b": 1, "a": [2.0]}'}
    assert reply.flags == []


def test_parallel_calls_come_in_order(read: Callable[..., Reply]) -> None:
    """Every call of a turn comes out, in the order it was sampled, with an id of its own."""
    text = "".join(
        f'<tool_call>{{"name": "f{i}", "arguments": {{"i": {i}}}}}</tool_call>\n' for i in range(4)
    )
    reply = read(text)
    assert _calls(reply) == [(f"f{i}", {"i": i}) for i in range(4)]
    assert len({c["id"] for c in reply.message["tool_calls"]}) == 4


def test_call_ids_are_unique_over_turns(read: Callable[..., Reply]) -> None:
    """Call ids are minted from the turn's id, so an echo names the turn."""
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    ids = [c["id"] for turn in ("t1", "t2") for c in read(text, turn=turn).message["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(turn in i for turn, i in zip(("t1", "t1", "t2", "t2"), ids, strict=True))


def test_content_before_a_call_is_kept(read: Callable[..., Reply]) -> None:
    """What was said before the first call is the content, trimmed at its ends."""
    reply = read('Let me see.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert reply.message["content"] == "Let me see."
    assert _calls(reply) == [("f", {})]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {',
        '{"name": "f"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": 5, "arguments": {}}',
        '["f", {}]',
        '"f"',
        "null",
        "",
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\udc00", "arguments": {}}',
        '{"name": "f", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2000 + "}",
    ],
)
def test_a_malformed_call_is_content_and_flagged(read: Callable[..., Reply], body: str) -> None:
    """What is no call goes out as text, flagged, and can be sent and stored as JSON."""
    text = f"Hm.<tool_call>{body}</tool_call>"
    reply = read(text)
    assert reply.message == {"role": "assistant", "content": text}
    assert reply.flags == ["malformed_tool_call"]
    assert reply.finish_reason == "stop"
    assert orjson.loads(orjson.dumps(reply.message)) == reply.message


def test_one_malformed_call_spoils_the_turn(read: Callable[..., Reply]) -> None:
    """A good call beside a broken one is not sent alone: the model said both."""
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{oops</tool_call>'
    assert read(text).message["content"] == text
    assert read(text).flags == ["malformed_tool_call"]


def test_a_call_cut_off_is_content_with_reason_length(read: Callable[..., Reply]) -> None:
    """Half a call is no call; the client is told that the tokens ran out."""
    reply = read('<tool_call>{"name": "f", "argu', "length")
    assert reply.message["content"] == '<tool_call>{"name": "f", "argu'
    assert (reply.finish_reason, reply.flags) == ("length", ["malformed_tool_call"])


def test_a_whole_call_before_the_cut_is_a_call(read: Callable[..., Reply]) -> None:
    """A complete call is sent though the turn then ran out; the finish reason stays length."""
    reply = read('<tool_call>{"name": "f", "arguments": {}}</tool_call> and', "length")
    assert _calls(reply) == [("f", {})]
    assert reply.finish_reason == "length"


def test_nothing_is_parsed_when_no_tools_were_offered(read: Callable[..., Reply]) -> None:
    """Agents that prompt for calls in text get their text untouched."""
    text = 'See <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(text, tools=False) == Reply({"role": "assistant", "content": text}, "stop", [])


def test_control_tokens_sampled_inside_are_not_shown(chat: Chat) -> None:
    """A control token inside a completion is not text; only the last one ends the turn."""
    tokenizer = chat()
    stop = tokenizer.stop_ids[0]
    ids = token_ids([*tokenizer.encode("a"), stop, *tokenizer.encode("b"), stop])
    reply = ReplyReader(tokenizer, FAMILIES["hermes"]).reply(ids, "stop", "t")
    assert reply.message["content"] == "ab"


def test_half_a_character_is_replaced(chat: Chat) -> None:
    """A completion cut inside a UTF-8 sequence is still valid text."""
    tokenizer = chat()
    reply = ReplyReader(tokenizer, FAMILIES["hermes"], TOOLS).reply(tokenizer.encode("天")[:2], "length", "t")
    assert reply.message["content"] == "\ufffd"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(TEXT, st.dictionaries(TEXT, TEXT | st.integers() | st.none())), min_size=1, max_size=3)
)
def test_unicode_calls_survive_the_round_trip(
    read: Callable[..., Reply], calls: list[tuple[str, Any]]
) -> None:
    """Any names and arguments that hold no marker come out as they were said."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = "".join(f"<tool_call>{json.dumps(c, ensure_ascii=False)}</tool_call>" for c in objects)
    if text.count("tool_call>") == 2 * len(calls) and "<|" not in text:
        assert _calls(read(text)) == calls
