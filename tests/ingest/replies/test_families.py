"""What each family reads: its real forms, its broken ones, reasoning, and the text around calls."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.replies.family import Call, Parsed

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = (
    '<｜DSML｜{outer}>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">5</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{outer}>'
)
HARMONY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def _v3(*calls: tuple[str, str], form: str = V3) -> str:
    return "\n".join(form.replace("{name}", n).replace("{arguments}", a) for n, a in calls)


def _parse(family: str, text: str, tools: Any, *, in_reasoning: bool = False) -> Parsed:
    return FAMILIES[family].parse(text, tools, in_reasoning=in_reasoning, final=True)


ONE = (("f", '{"s": "5", "n": 5}'),)
TWO = (("f", '{"s":"é"}'), ("g", "{}"))

# Family, text, calls with their arguments letter for letter.
FORMS: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "5", "n": 5}}\n</tool_call>', ONE),
    ("hermes", '<tool_call>{"arguments":{"s": "5", "n": 5},"name":"f"}</tool_call>\n', ONE),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"s":"é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        TWO,
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
        ONE,
    ),
    (
        "qwen_coder",
        "<tool_call><function=f><parameter=s>5</parameter><parameter=n>5</parameter></function></tool_call>",
        ONE,
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\né\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>\n",
        (("f", '{"s": "é"}'), ("g", "{}")),
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>",
        ONE,
    ),
    (
        "glm",
        "<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value><arg_key>n</arg_key>"
        "<arg_value>5</arg_value></tool_call>",
        ONE,
    ),
    ("glm", "<tool_call>g</tool_call><tool_call>g\n</tool_call>", (("g", "{}"), ("g", "{}"))),
    ("llama_json", '{"name": "f", "parameters": {"s": "5", "n": 5}}', ONE),
    ("llama_json", ' <|python_tag|>{"name": "f", "parameters": {"s": "5", "n": 5}}\n', ONE),
    ("llama_json", '{"type": "function", "name": "f", "arguments": {"s": "5", "n": 5}}', ONE),
    ("llama_json", '{"name": "f", "parameters": {"s":"é"}}; {"name": "g", "parameters": {}}', TWO),
    ("llama_json", '{"name": "f", "parameters": {"s":"é"}}\n{"name": "g", "parameters": {}};', TWO),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "5", "n": 5}, "id": "abcdefghi"}]', ONE),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"s":"é"}}, {"name": "g", "arguments": {}}]',
        TWO,
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "5", "n": 5}', ONE),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"s": "5", "n": 5}', ONE),
    ("mistral", '[TOOL_CALLS]f{"s":"é"}[TOOL_CALLS]g[ARGS] {}', TWO),
    ("deepseek", ALL + _v3(*ONE) + ALL_END, ONE),
    ("deepseek", ALL + _v3(*TWO) + ALL_END, TWO),
    ("deepseek", ALL + _v3(*ONE), ONE),
    ("deepseek", ALL + _v3(*ONE, form=V31) + ALL_END, ONE),
    ("deepseek", ALL + _v3(*TWO, form=V31) + ALL_END, TWO),
    ("deepseek", _v3(*TWO, form=V31), TWO),
    ("deepseek", DSML.format(outer="function_calls"), ONE),
    ("deepseek", DSML.format(outer="tool_calls"), ONE),
    ("lfm2", "<|tool_call_start|>[f(s='5', n=5)]<|tool_call_end|>", ONE),
    ("lfm2", '<|tool_call_start|> [ f( s = "5", n=5 ,) ] <|tool_call_end|>\n', ONE),
    ("lfm2", "<|tool_call_start|>[f(s='\\u00e9'), g()]<|tool_call_end|>", (("f", '{"s": "é"}'), TWO[1])),
    (
        "lfm2",
        "<|tool_call_start|>[f(s='é')]<|tool_call_end|><|tool_call_start|>[g()]<|tool_call_end|>",
        (("f", '{"s": "é"}'), TWO[1]),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(o={'a': [1, None, true]}, b=False, x=-1.5e3)]<|tool_call_end|>",
        (("f", '{"o": {"a":[1,null,true]}, "b": false, "x": -1.5e3}'),),
    ),
    ("gpt_oss", HARMONY + '{"s": "5", "n": 5}', ONE),
    ("gpt_oss", HARMONY + '{"s": "5", "n": 5}<|call|>', ONE),
    ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"s": "5", "n": 5}', ONE),
    ("gpt_oss", '<|channel|>analysis to=functions.f code<|message|>\n{"s": "5", "n": 5}<|call|>', ONE),
    ("gpt_oss", '<|channel|>commentary to=f<|message|>{"s": "5", "n": 5}', ONE),
    (
        "gpt_oss",
        HARMONY + '{"s":"é"}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}',
        TWO,
    ),
]


@pytest.mark.parametrize(("family", "text", "calls"), FORMS)
def test_forms_that_models_sample_are_parsed(
    tools: list[dict[str, Any]], family: str, text: str, calls: tuple[tuple[str, str], ...]
) -> None:
    """What models sample, and the calls it says; JSON they sampled is kept to the letter."""
    expected = Parsed(None, "", tuple(Call(*call) for call in calls), ())
    assert _parse(family, text, tools) == expected


@pytest.mark.parametrize(("family", "text", "calls"), [form for form in FORMS if form[0] != "llama_json"])
def test_text_around_calls(
    tools: list[dict[str, Any]], family: str, text: str, calls: tuple[tuple[str, str], ...]
) -> None:
    """Text before is the content without its trailing white space; text behind is dropped and flagged."""
    before, after = " So:\n\n", "\n\n Done"
    if family == "gpt_oss":
        before, after = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant", ""
    parsed = _parse(family, before + text + after, tools)
    assert parsed.content == " So:"
    assert [(c.name, c.arguments) for c in parsed.calls] == list(calls)
    assert parsed.flags == (("text_after_calls",) if after else ())


def test_text_around_llamas_calls(tools: list[dict[str, Any]]) -> None:
    """Only the tag tells a call from the text before it, and nothing from the text behind."""
    call = '{"name": "g", "parameters": {}}'
    assert _parse("llama_json", f"So: {call}", tools) == Parsed(None, f"So: {call}")
    assert _parse("llama_json", f"So: <|python_tag|>{call}", tools) == Parsed(None, "So:", (Call("g", "{}"),))
    for text in (f"{call} Done", f"<|python_tag|>{call} Done"):
        assert _parse("llama_json", text, tools) == Parsed(None, text, (), ("malformed_tool_call",))


@pytest.mark.parametrize(("family", "text", "calls"), FORMS)
def test_nothing_is_parsed_without_tools(family: str, text: str, calls: tuple[tuple[str, str], ...]) -> None:
    """Agents that prompt for calls in text get their text, to the letter."""
    for none in (None, []):
        assert _parse(family, text, none) == Parsed(None, text)


JSON_BODIES = [
    '{"name": "f", "arguments": {',
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": 5, "arguments": {}}',
    '["f", {}]',
    "null",
    "",
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
    '{"name": "\\udc00", "arguments": {}}',
    '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f", "arguments": {}}}',
    '{"name": "f", "arguments": ' + '{"a":' * 10_000 + "1" + "}" * 10_000 + "}",
]
MALFORMED = [
    *(
        ("lfm2", f"<|tool_call_start|>{call}")
        for call in (
            *(
                "[f(s='5')",
                "[f(s='5']<|tool_call_end|>",
                "[f('5')]<|tool_call_end|>",
                "[f(s=5 n=5)]<|tool_call_end|>",
            ),
            *(
                "[]<|tool_call_end|>",
                "[f(s='5)]<|tool_call_end|>",
                "[f(s=x)]<|tool_call_end|>",
                "f(s=5)<|tool_call_end|>",
            ),
            *("[f(o={'a': 1)]<|tool_call_end|>", "[f(o={1: 1})]<|tool_call_end|>", "[f()", "", "[" * 5000),
        )
    ),
    *(("hermes", f"<tool_call>{body}</tool_call>") for body in JSON_BODIES),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{oops</tool_call>'),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=s>\nhalf of i"),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=s>\nwhole\n</parameter>\n"),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=s\nx\n</parameter>\n</function>\n</tool_call>"),
    ("qwen_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen_coder", "<tool_call>\nf(s)\n</tool_call>"),
    ("qwen_coder", "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>"),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\n\ud800\n</parameter>\n</function>\n</tool_call>",
    ),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>half"),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n"),
    ("glm", "<tool_call></tool_call>"),
    ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("llama_json", '{"name": "f", "parameters": {'),
    ("llama_json", '{"name": "f", "parameters": {}}; {"name": "g"}'),
    ("llama_json", '<|python_tag|>print("x")'),
    ("llama_json", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek", ALL),
    ("deepseek", ALL + _v3(("f", "{"))),
    ("deepseek", ALL + "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
    ("deepseek", ALL + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": 1}'),
    ("deepseek", ALL + _v3(*ONE) + "<｜tool▁call▁begin｜>"),
    ("deepseek", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s">x'),
    ("deepseek", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("gpt_oss", HARMONY + '{"s": '),
    ("gpt_oss", HARMONY + "<|call|>"),
    ("gpt_oss", "<|channel|>commentary to=python code<|message|>print(1)<|call|>"),
]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_malformed_call_is_content_and_flagged(tools: list[dict[str, Any]], family: str, text: str) -> None:
    """What is no call goes out as it was sampled, but for the reasoning."""
    assert _parse(family, text, tools) == Parsed(None, text, (), ("malformed_tool_call",))
    if family == "gpt_oss":
        thought, final = "<|channel|>analysis<|message|>Hm<|end|>", "<|channel|>final<|message|>A <|end|>"
        parsed = _parse(family, f"{thought}{final}<|start|>assistant{text}", tools)
        assert parsed == Parsed("Hm", f"A <|start|>assistant{text}", (), ("malformed_tool_call",))
    elif family != "llama_json":
        parsed = _parse(family, f"<think>Hm</think>\n\nA {text}", tools)
        assert parsed == Parsed("Hm", f"A {text}", (), ("malformed_tool_call",))


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\n5\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>",
    ],
)
def test_qwens_dropped_tags_are_mended_and_flagged(tools: list[dict[str, Any]], text: str) -> None:
    """The tags that such models drop bear no meaning; the call is read, and the log knows."""
    assert _parse("qwen_coder", text, tools) == Parsed(None, "", (Call(*ONE[0]),), ("mended_tool_call",))


def test_an_empty_value_may_lack_its_tag(tools: list[dict[str, Any]]) -> None:
    """The line feed behind its opening tag is the only one before the next tag."""
    head = "<tool_call>\n<function=f>\n<parameter=s>\n"
    for tail, arguments in (
        ("<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>", '{"s": "", "n": 5}'),
        ("</function>\n</tool_call>", '{"s": ""}'),
    ):
        expected = Parsed(None, "", (Call("f", arguments),), ("mended_tool_call",))
        assert _parse("qwen_coder", head + tail, tools) == expected


@pytest.mark.parametrize(
    ("parameter", "arguments"),
    [
        ('name="n" string="true"', '{"n": "5"}'),
        ('name="s" string="false"', '{"s": 5}'),
        ('name="n"', '{"n": 5}'),
        ('name="s"', '{"s": "5"}'),
    ],
)
def test_dsml_says_what_is_a_string(tools: list[dict[str, Any]], parameter: str, arguments: str) -> None:
    """The model's word comes before the schema's."""
    text = (
        f'<｜DSML｜invoke name="f">\n<｜DSML｜parameter {parameter}>5</｜DSML｜parameter>\n</｜DSML｜invoke>'
    )
    assert _parse("deepseek", text, tools) == Parsed(None, "", (Call("f", arguments),))


def test_values_may_speak_of_tags(tools: list[dict[str, Any]]) -> None:
    """A value ends at its closing tag only if another tag follows it."""
    value = "a </parameter> b\n<parameter=zzz>\nc </function> d"
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"
    parsed = _parse("qwen_coder", text, tools)
    assert [json.loads(c.arguments) for c in parsed.calls] == [{"s": value}]
    assert parsed.flags == ()
    value = "a </arg_value> b </tool_call>"
    text = f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert [json.loads(c.arguments) for c in _parse("glm", text, tools).calls] == [{"s": value}]


def test_a_json_answer_is_no_malformed_call(tools: list[dict[str, Any]]) -> None:
    """Llama's calls have no mark; an object that does not look like one is an answer."""
    for text in ('{"answer": 42}', "{x} is a set", '{"answer": '):
        assert _parse("llama_json", text, tools) == Parsed(None, text)


# Reasoning --------------------------------------------------------------------------------------

TAGGED = sorted(set(FAMILIES) - {"gpt_oss"})


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n\nSo?\n</think>\n\nYes. ", Parsed("Hm.\n\nSo?", "Yes. ")),
        (" \n<think>Hm</think>Yes", Parsed("Hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", Parsed("", "Yes")),
        ("<think>\n\n</think>", Parsed("", "")),
        ("<think>Hm</think>\n\n  Yes", Parsed("Hm", "  Yes")),
        ("<think>Hm <think> </think>a</think>", Parsed("Hm <think>", "a</think>")),
        ("<think>\nHm. ", Parsed("Hm.", "", (), ("unclosed_reasoning",))),
        ("<think>", Parsed("", "", (), ("unclosed_reasoning",))),
        ("Yes <think>Hm</think>", Parsed(None, "Yes <think>Hm</think>")),
        ("<thinker>Hm</think>", Parsed(None, "<thinker>Hm</think>")),
        ("<thi", Parsed(None, "<thi")),
        ("  Sunny.\n\n", Parsed(None, "  Sunny.\n\n")),
        ("\u3000天", Parsed(None, "\u3000天")),
        ("", Parsed(None, "")),
    ],
)
def test_reasoning_in_tags(tools: list[dict[str, Any]], family: str, text: str, expected: Parsed) -> None:
    """A block at the very start, trimmed; whatever else is the answer, with or without tools."""
    assert _parse(family, text, tools) == expected
    assert _parse(family, text, None) == expected


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nHm.\n</think>\n\nYes", Parsed("Hm.", "Yes")),
        ("<think>\nHm</think>Yes", Parsed("Hm", "Yes")),
        ("</think>Yes", Parsed("", "Yes")),
        ("Hm", Parsed("Hm", "", (), ("unclosed_reasoning",))),
        ("", Parsed("", "", (), ("unclosed_reasoning",))),
    ],
)
def test_reasoning_that_the_prompt_opened(
    tools: list[dict[str, Any]], family: str, text: str, expected: Parsed
) -> None:
    """It goes on in the completion, which may open it once more."""
    assert _parse(family, text, tools, in_reasoning=True) == expected


def test_calls_behind_and_inside_reasoning(tools: list[dict[str, Any]]) -> None:
    """A call behind the block is one; a call that is only thought of is not."""
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    parsed = _parse("hermes", f"<think>{call}</think>\n\nNow.\n{call}", tools)
    assert parsed == Parsed(call, "Now.", (Call("g", "{}"),))
    assert _parse("hermes", f"<think>{call}", tools) == Parsed(call, "", (), ("unclosed_reasoning",))


def test_magistrals_brackets(tools: list[dict[str, Any]]) -> None:
    """Mistral's own spelling, closed by itself only."""
    parsed = _parse("mistral", "[THINK]Hm </think>[/THINK]Yes[TOOL_CALLS]g[ARGS]{}", tools)
    assert parsed == Parsed("Hm </think>", "Yes", (Call("g", "{}"),))
    assert _parse("hermes", "[THINK]Hm[/THINK]Yes", tools) == Parsed(None, "[THINK]Hm[/THINK]Yes")


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}Hm\n<|end|><|start|>assistant{FINAL} Yes ", Parsed("Hm", " Yes ")),
        (f"{ANALYSIS}Hm<|end|>\n<|start|>assistant{FINAL}Yes<|return|>", Parsed("Hm", "Yes")),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B<|end|>{FINAL}C", Parsed("A\nB", "C")),
        (f"{ANALYSIS}Hm{FINAL}Yes", Parsed("Hm", "Yes")),
        (f"{FINAL}Yes", Parsed(None, "Yes")),
        ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', Parsed(None, '{"a": 1}')),
        (
            f"<|channel|>commentary<|message|>Soon.<|end|><|start|>assistant{FINAL}Now.",
            Parsed(None, "Soon.\nNow."),
        ),
        ("<|channel|>commentary to=assistant<|message|>Hi", Parsed(None, "Hi")),
        (f"{ANALYSIS}Hm ", Parsed("Hm", "", (), ("unclosed_reasoning",))),
        (f"{ANALYSIS}Hm<|end|>", Parsed("Hm", "")),
        (f"{ANALYSIS}Hm<|end|><|start|>assistant<|chan", Parsed("Hm", "", (), ("malformed_message",))),
        (
            f"<|channel|>commentary 2?<|end|><|start|>assistant{FINAL}A",
            Parsed(None, "A", (), ("malformed_message",)),
        ),
        (f"<|channel|>??<|channel|>commentary?{ANALYSIS}Hm<|end|>", Parsed("Hm", "")),
        ("Plain text", Parsed(None, "Plain text")),
        ("Plain<|end|>", Parsed(None, "Plain")),
        ("", Parsed(None, "")),
    ],
)
def test_harmony_messages(tools: list[dict[str, Any]], text: str, expected: Parsed) -> None:
    """Analysis is reasoning, final and preambles are content, and broken headers cost no reply."""
    assert _parse("gpt_oss", text, tools) == expected
    assert _parse("gpt_oss", text, None) == expected


def test_harmony_behind_an_open_analysis(tools: list[dict[str, Any]]) -> None:
    """A prompt may end inside the analysis."""
    parsed = _parse("gpt_oss", f"Hm<|end|><|start|>assistant{FINAL}Yes", tools, in_reasoning=True)
    assert parsed == Parsed("Hm", "Yes")
    text = f"{HARMONY}{{}}<|call|><|start|>assistant{FINAL}Done"
    assert _parse("gpt_oss", text, tools) == Parsed(None, "", (Call("f", "{}"),), ("text_after_calls",))


def test_markers_are_the_tokens_that_matter() -> None:
    """The special tokens of real tokenizers that a parser would miss are named."""
    named = {
        "llama_json": {"<|python_tag|>"},
        "mistral": {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"},
        "deepseek": {
            ALL,
            ALL_END,
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "｜DSML｜",
        },
        "glm": {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"},
        "gpt_oss": {
            f"<|{t}|>" for t in ("start", "channel", "message", "constrain", "end", "call", "return")
        },
        "hermes": {"<tool_call>", "</tool_call>", "<think>", "</think>"},
        "qwen_coder": {"<tool_call>", "</tool_call>", "<think>", "</think>"},
        "lfm2": {"<|tool_call_start|>", "<|tool_call_end|>"},
        "plain": {"<think>", "</think>"},
    }
    assert {name for name in FAMILIES if not named[name] <= FAMILIES[name].markers} == set()


def test_calls_can_be_sent(tools: list[dict[str, Any]]) -> None:
    """Whatever was read is valid JSON, in the order it was sampled."""
    for family, text, _ in FORMS:
        for call in _parse(family, text, tools).calls:
            assert isinstance(orjson.loads(call.arguments), dict)
