"""Replies read by a model's own response template, through transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rollbook.ingest.replies.choose import PLAIN
from rollbook.ingest.replies.family import Call, Parsed
from rollbook.ingest.replies.response_schema import ResponseTemplate, schema_family
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import ModelError, ReplyError

# In the style of Gemma 4, which ships one.
TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {
            "open": "<|channel>thought\n",
            "close_pattern": r"<channel\|>\s*",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"(?:<turn\|>)\s*|$", "content": "text"},
    },
}
CALL = '<|tool_call>call:f{s:<|"|>5<|"|>,n:5}<tool_call|>'
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def family() -> ResponseTemplate:
    """The template, loaded."""
    pytest.importorskip("transformers")
    template = schema_family(TEMPLATE)
    assert template is not None
    return template


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes.", Parsed(None, "Yes.")),
        ("<|channel>thought\nHm<channel|>Yes.", Parsed("Hm", "Yes.")),
        (f"So: {CALL}", Parsed(None, "So:", (Call("f", '{"s": "5", "n": 5}'),))),
        (
            f"<|channel>thought\nHm<channel|>{CALL}{CALL}",
            Parsed("Hm", "", (Call("f", '{"s": "5", "n": 5}'),) * 2),
        ),
        (
            "<|channel>thought\nHm<channel|>So: <|tool_call>call:f{s:",
            Parsed("Hm", "So: <|tool_call>call:f{s:", (), ("malformed_tool_call",)),
        ),
        (
            "<|tool_call>call:f[1]<tool_call|>",
            Parsed(None, "<|tool_call>call:f[1]<tool_call|>", (), ("malformed_tool_call",)),
        ),
        (
            "<|tool_call>call:f{s:NaN}<tool_call|>",
            Parsed(None, "<|tool_call>call:f{s:NaN}<tool_call|>", (), ("malformed_tool_call",)),
        ),
    ],
)
def test_replies_of_a_template(
    family: ResponseTemplate, tools: list[dict[str, Any]], text: str, expected: Parsed
) -> None:
    """Reasoning, content and calls where the template finds them; what it cannot read is content."""
    assert family.parse(text, tools, in_reasoning=False, final=True) == expected


def test_no_calls_without_tools_and_no_stream(family: ResponseTemplate, tools: list[dict[str, Any]]) -> None:
    """Without tools a call is text; what is not whole says nothing yet."""
    assert family.parse(f"So: {CALL}", None, in_reasoning=False, final=True) == Parsed(None, f"So: {CALL}")
    assert family.parse("Yes.", tools, in_reasoning=False, final=False) == Parsed(None, "")


def test_reasoning_that_the_prompt_opened(family: ResponseTemplate, tools: list[dict[str, Any]]) -> None:
    """The template's own opening is put in front."""
    assert family.parse("Hm<channel|>Yes.", tools, in_reasoning=True, final=True) == Parsed("Hm", "Yes.")


def test_markers_come_from_strings_and_patterns(family: ResponseTemplate) -> None:
    """Every control token that the template speaks of."""
    assert family.markers >= {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"}


def test_a_template_that_is_none() -> None:
    """A broken template is told at once, not at the first reply."""
    pytest.importorskip("transformers")
    for broken in ({}, {"fields": {}}, {"fields": {"content": {"open_pattern": "("}}, "start_anchor": "x"}):
        with pytest.raises(ModelError, match="response_template"):
            schema_family(broken)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core install has none; the model's family is then told by its chat template."""
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    assert schema_family(TEMPLATE) is None


def test_a_chat_template_writes_what_it_reads(
    family: ResponseTemplate, real_chat: Callable[..., ChatTokenizer], tools: list[dict[str, Any]]
) -> None:
    """Such a family has no writer: the text is the chat template's, taken if it is read back."""
    writer = ReplyWriter(real_chat("gemma4_v5"), family)
    arguments = {"s": "5", "n": 5}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    reply = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]}
    written = writer.write([{"role": "user", "content": "Hi"}], tools, reply)
    assert written.text == (
        '<|channel>thought\nHm\n<channel|><|tool_call>call:f{n:5,s:<|"|>5<|"|>}<tool_call|><|tool_response>'
    )
    plain = ReplyWriter(real_chat("gemma4_v5"), PLAIN)
    with pytest.raises(ReplyError, match="reasoning and calls"):
        plain.write([{"role": "user", "content": "Hi"}], tools, reply)
