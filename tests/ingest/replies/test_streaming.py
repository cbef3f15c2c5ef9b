"""Streaming: of any prefix only what the whole text begins with; and no text is too broken or too long."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.replies.family import Parsed

MARKS = sorted({mark for family in FAMILIES.values() for mark in family.markers})
PIECES = [
    *MARKS,
    *("<function=f>", "<parameter=s>", "</parameter>", "</function>", "<function=", "<parameter="),
    *(
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
    ),
    *('<｜DSML｜parameter name="s" string="false">', "</｜DSML｜parameter>"),
    *("analysis", "final", "commentary", " to=functions.f", "assistant", " json", "function"),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {"s": 1}}',
        '{"s": "',
        '"}',
        "{}",
        "[",
        "]",
    ),
    *(
        "```json\n",
        "\n```",
        ";",
        ",",
        "f",
        "s",
        " ",
        "\n",
        "\n\n",
        "  \n",
        "\t",
        "\u3000",
        "\x00",
        "天",
        "\ud800",
    ),
]
# Halves of markers, too, and any text.
TEXTS = st.lists(
    st.sampled_from(PIECES)
    | st.sampled_from(MARKS).flatmap(lambda m: st.integers(1, len(m)).map(lambda n: m[:n]))
    | st.text(st.characters(), max_size=4),
    max_size=12,
).map("".join)

TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}},
}


def _check_law(name: str, text: str, tools: Any, in_reasoning: bool) -> None:
    """Every prefix's parse begins the next one's and the whole text's."""
    family = FAMILIES[name]
    whole = family.parse(text, tools, in_reasoning=in_reasoning, final=True)
    before = Parsed(None, "")
    for length in range(len(text) + 1):
        now = family.parse(text[:length], tools, in_reasoning=in_reasoning, final=False)
        assert (now.calls, now.flags) == ((), ())
        assert now.content.startswith(before.content)
        assert (now.reasoning or "").startswith(before.reasoning or "")
        assert now.reasoning is not None or before.reasoning is None
        before = now
    assert whole.content.startswith(before.content)
    assert (whole.reasoning or "").startswith(before.reasoning or "")
    for call in whole.calls:
        assert isinstance(orjson.loads(call.arguments), dict)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(text=TEXTS, offered=st.booleans(), in_reasoning=st.booleans())
@example(text="So: \n<tool_call>{oops</tool_call>", offered=True, in_reasoning=False)
@example(text=" \n<think> Hm \n</think>\n\n A <tool_c", offered=True, in_reasoning=False)
@example(text="Hm </thin </think> \n", offered=True, in_reasoning=True)
def test_what_streams_is_a_prefix_of_the_whole_reply(
    name: str, text: str, offered: bool, in_reasoning: bool
) -> None:
    """The law, at every split of any text, for every family."""
    _check_law(name, text, [TOOL] if offered else None, in_reasoning)


REAL = {
    "hermes": "<think>\nHm\n</think>\n\nSo:\n"
    '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>\n',
    "qwen_coder": "So:\n\n"
    "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm": "\n<think>Hm</think>\nSo:\n"
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "llama_json": '{"name": "f", "parameters": {"s": "x"}}',
    "mistral": '[THINK]Hm[/THINK]So: [TOOL_CALLS]f[CALL_ID]abc[ARGS]{"s": "x"}[TOOL_CALLS]f[ARGS]{}',
    "deepseek": "So:<｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>analysis<|message|>Hm<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>So: \n"
    '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "x"}',
    "lfm2": "<think>Hm</think>So: \n<|tool_call_start|>[f(s='x'), f()]<|tool_call_end|>",
    "plain": "<think>Hm</think>So <think>",
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("offered", [True, False])
def test_real_replies_stream(name: str, offered: bool) -> None:
    """The law on what models really say, whole and cut off."""
    for length in range(len(REAL[name]) + 1):
        _check_law(name, REAL[name][:length], [TOOL] if offered else None, False)


@pytest.mark.parametrize(
    ("name", "text", "in_reasoning", "reasoning", "content"),
    [
        ("hermes", "Hello wor", False, None, "Hello wor"),
        ("hermes", "Hello ", False, None, "Hello"),
        ("hermes", "Hello <", False, None, "Hello"),
        ("hermes", "Hello <tool_cal", False, None, "Hello"),
        ("hermes", "Hello <tool_calm", False, None, "Hello <tool_calm"),
        ("hermes", "Hello <tool_call>{", False, None, "Hello"),
        ("hermes", " \n<thin", False, None, ""),
        ("hermes", "<thin air", False, None, "<thin air"),
        ("hermes", "<think>\nHm, so ", False, "Hm, so", ""),
        ("hermes", "<think>\nHm</thi", False, "Hm", ""),
        ("hermes", "<think>\nHm</thick", False, "Hm</thick", ""),
        ("hermes", "<think>Hm</think>\n\nYes", False, "Hm", "Yes"),
        ("hermes", "Hm</think>\n\nYes", True, "Hm", "Yes"),
        ("qwen_coder", "Yes <function", False, None, "Yes"),
        ("llama_json", '  {"a', False, None, ""),
        ("llama_json", "Yes {", False, None, "Yes {"),
        ("mistral", "[THINK]Hm[/TH", False, "Hm", ""),
        ("mistral", "Yes [TOOL", False, None, "Yes"),
        ("deepseek", "Yes <｜tool▁c", False, None, "Yes"),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm<|en", False, "Hm", ""),
        ("gpt_oss", "<|channel|>final<|message|>Yes, s", False, None, "Yes, s"),
        ("gpt_oss", "<|channel|>final<|mess", False, None, ""),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{", False, None, ""),
    ],
)
def test_as_much_streams_as_is_certain(
    name: str, text: str, in_reasoning: bool, reasoning: str | None, content: str
) -> None:
    """What may be a marker or trimmed white space waits; nothing else does."""
    parsed = FAMILIES[name].parse(text, [TOOL], in_reasoning=in_reasoning, final=False)
    assert parsed == Parsed(reasoning, content)


def test_text_streams_to_the_letter_without_tools() -> None:
    """No call can follow, so nothing of the answer has to wait."""
    for name in sorted(set(FAMILIES) - {"gpt_oss"}):
        parsed = FAMILIES[name].parse("Hello <tool_cal \n", None, in_reasoning=False, final=False)
        assert parsed.content == "Hello <tool_cal \n"


LONG = [
    *(piece * (200_000 // len(piece)) for piece in PIECES if piece.strip()),
    *(mark + "[" * 200_000 for mark in MARKS),
    *(mark + '{"a":' * 40_000 for mark in MARKS),
    *(mark + '{"' + '\\"' * 100_000 for mark in MARKS),
    *((mark + " " * 40) * 3000 for mark in MARKS),
    "<think>" + "<tool_call>\n" * 20_000,
    "<function=f><parameter=s>\n" + "</parameter>   " * 14_000,
    "<function=f>" + "<parameter=s>\n" * 14_000,
    "<function=f>" + "<parameter=s>\n</parameter>\n" * 7_000,
    "<tool_call>f" + "<arg_key>s</arg_key><arg_value>" * 6_000,
    "<|channel|>c to=f<|message|>{" * 7_000,
    "<|channel|>final<|message|>" * 7_000,
    '{"name": "f", "parameters": {}};' * 6_000 + "x",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 4_000,
    "[TOOL_CALLS]f[CALL_ID]" * 9_000,
    '{"s": "' * 30_000,
    " " * 200_000,
    "\n" * 200_000 + "<think>",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_long_texts_take_no_time(name: str) -> None:
    """200 KB of markers, braces or quotes: each parse within twenty seconds of the CPU, whole or not.

    Steps that grow with the square of the length would take minutes.
    """
    for text in LONG:
        for final in (True, False):
            start = time.thread_time()
            FAMILIES[name].parse(text, [TOOL], in_reasoning=False, final=final)
            assert time.thread_time() - start < 20, (name, text[:40], final)


ODD_TOOLS: list[Any] = [
    [{}],
    [None],
    [{"function": None}],
    [{"function": {"name": "f", "parameters": []}}],
    [{"function": {"name": "f", "parameters": {"properties": []}}}],
    [{"function": {"name": "f", "parameters": {"properties": {"s": True}}}}],
    [{"function": {"name": "f", "parameters": {"properties": {"s": {"$ref": "#/properties/s"}}}}}],
    [{"function": {"name": "f", "parameters": {"properties": {"s": {"type": 5, "anyOf": 5, "enum": 5}}}}}],
    [{"function": {"name": "f", "parameters": {"properties": {"s": {"enum": [10**400, None, [], {}]}}}}}],
]


@pytest.mark.parametrize("tools", ODD_TOOLS)
def test_odd_tools_raise_nothing(tools: Any) -> None:
    """Tools come from clients; a schema that says nothing sensible says nothing."""
    for name, text in REAL.items():
        calls = FAMILIES[name].parse(text, tools, in_reasoning=False, final=True).calls
        assert bool(calls) is (name != "plain")
        assert all(orjson.loads(c.arguments) in ({"s": "x"}, {}) for c in calls)
