"""Calls rendered by real chat templates and read back: the same names, the same arguments."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollbook.ingest.replies.choose import FAMILIES, detect_family
from rollbook.ingest.tokens.chat_template import compile_template

CHATML = ("<|im_start|>assistant\n", "<|im_end|>")
LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
DEEPSEEK = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
CHATML_NAMES = (
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    *("qwen2_5_training", "qwen3_training", "qwen3_6_training", "nemotron_3_nano_training"),
)

# Where the reply of a rendered conversation begins and ends, and how many calls a template can hold.
TEMPLATES: dict[str, tuple[str, str, int]] = {
    **dict.fromkeys(CHATML_NAMES, (*CHATML, 3)),
    "glm4moe": ("<|assistant|>", "\0", 3),
    "glm4moe_training": ("<|assistant|>", "<|observation|>", 3),
    "deepseekv3": (*DEEPSEEK, 3),
    "deepseek_r1_distill": (*DEEPSEEK, 1),
    "llama3_1": (*LLAMA, 1),
    "llama3_2": (*LLAMA, 1),
    "gptoss": ("<|start|>assistant", "<|call|>", 1),
    "lfm2_v2": (*CHATML, 3),
    "mistral_array": ("[/INST]", "</s>", 3),
    "mistral_named": ("[/INST]", "</s>", 3),
}
# The corpus has no template of Mistral's; these render the wire's two forms.
MISTRAL = {
    "mistral_array": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{{ m.content or '' }}[TOOL_CALLS][{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "abcdefgh{{ loop.index }}"}{% endfor %}]</s>{% endif %}{% endfor %}'
    ),
    "mistral_named": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{{ m.content or '' }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]abcdefgh"
        "{{ loop.index }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
    ),
}
compiled = functools.cache(compile_template)
STRING_ARGUMENTS = ("deepseekv3", "deepseek_r1_distill")

MARKS = sorted(
    {mark for family in FAMILIES.values() for mark in family.markers} | {"<parameter=s>", "</function>"}
)
LEAF = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(
        ["10", "10.0", "true", "null", "None", '"q"', '{"a": 1}', "[1]", " x\n", "\n\n", "", "NaN"]
    )
    | st.sampled_from(MARKS).map(lambda mark: f"a {mark} b")
    | st.sampled_from(MARKS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
)
NESTED = st.recursive(
    LEAF | st.none(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text('aé" <', max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = st.text("abkö_-.1", min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(KEYS, NESTED, max_size=4)
NAMES = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_.-]{0,12}", fullmatch=True)

ODD = {
    "text": 'Ünïcode 天 "quoted" \\ back\nslash\n',
    "numeric": "10",
    "json": '{"a": [1, 2]}',
    "number": 10.0,
    "big": 12345678901234567890123,
    "flag": True,
    "nothing": None,
    "nested": {"list": [1, {"x": None}], "empty": {}, "s": "</tool_call>"},
    "mark": "see <tool_call> and </parameter> and </arg_value> and <|call|",
    "empty": "",
}


def _schema(value: Any) -> dict[str, str]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return {"type": kinds.get(type(value), "null")}


def _tools(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    tools = []
    for name, arguments in calls:
        properties = {key: _schema(value) for key, value in arguments.items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return tools


def _rendered(source: str, name: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The reply as the template renders it, without what ends the turn."""
    dump = name in STRING_ARGUMENTS
    shaped = [
        {"type": "function", "function": {"name": n, "arguments": json.dumps(a) if dump else a}}
        for n, a in calls
    ]
    body: Any = None if name == "deepseek_r1_distill" else content
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": body, "tool_calls": shaped},
    ]
    text = compiled(source).render(
        messages=messages,
        tools=None,
        add_generation_prompt=False,
        bos_token="",
        truncate_history_thinking=False,
    )
    begin, end, _ = TEMPLATES[name]
    reply = text.split(begin, 1)[1]
    return reply.rpartition(end)[0] if end in reply else reply


def _exact(value: Any) -> str:
    """JSON that tells 10 from 10.0 and True from 1."""
    return json.dumps(value, sort_keys=True)


def _check(corpus: dict[str, str], name: str, calls: list[tuple[str, dict[str, Any]]], content: str) -> None:
    source = MISTRAL.get(name) or corpus[name]
    family = FAMILIES[detect_family(source)]
    text = _rendered(source, name, content, calls)
    parsed = family.parse(text, _tools(calls), in_reasoning=False, final=True)
    assert parsed.flags == ()
    assert [c.name for c in parsed.calls] == [name for name, _ in calls]
    assert [_exact(json.loads(c.arguments)) for c in parsed.calls] == [_exact(a) for _, a in calls]
    # R1's template shows no content beside calls, Llama's neither; harmony's shows it as analysis.
    silent = name in ("deepseek_r1_distill", "llama3_1", "llama3_2", "gptoss")
    assert parsed.content == ("" if silent else content)
    if name == "gptoss":
        assert parsed.reasoning == (content or None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_odd_arguments_come_back(corpus: dict[str, str], name: str) -> None:
    """Unicode, nesting, numbers and what looks like them, line feeds, quotes, and markers in strings."""
    _check(corpus, name, [("look_up", ODD)], "Let me see.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_without_arguments_comes_back(corpus: dict[str, str], name: str) -> None:
    """No arguments are an empty object."""
    _check(corpus, name, [("now", {})], "")


@pytest.mark.parametrize("name", [n for n, (_, _, most) in TEMPLATES.items() if most > 1])
def test_parallel_calls_come_back_in_order(corpus: dict[str, str], name: str) -> None:
    """As many as there were, in their order, each with its own arguments."""
    calls: list[tuple[str, dict[str, Any]]] = [("a", {"i": 1}), ("b", {}), ("c", {"s": "</tool_call>"})]
    _check(corpus, name, calls, "Three of them:")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(called=NAMES, arguments=ARGUMENTS)
@example(called="f", arguments={"a": "", "b": "\n", "k": "</parameter>"})
def test_any_arguments_come_back(
    corpus: dict[str, str], name: str, called: str, arguments: dict[str, Any]
) -> None:
    """Whatever JSON there is to say, through every template."""
    _check(corpus, name, [(called, arguments)], "")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_8", "glm4moe", "gptoss"])
def test_reasoning_comes_back(corpus: dict[str, str], name: str) -> None:
    """A template's own reasoning block is read as it was said."""
    source = corpus[name]
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\n\nSo?", "thinking": "Hm.\n\nSo?"},
    ]
    text = compiled(source).render(messages=messages, tools=None, add_generation_prompt=False)
    begin, end = ("<|start|>assistant", "<|return|>") if name == "gptoss" else TEMPLATES[name][:2]
    reply = text.split(begin, 1)[1].split(end)[0]
    family = FAMILIES[detect_family(source)]
    parsed = family.parse(reply, None, in_reasoning=False, final=True)
    assert (parsed.reasoning, parsed.content, parsed.flags) == ("Hm.\n\nSo?", "Yes.", ())
    inside = reply.partition("<think>\n")[2]
    if inside:
        assert family.parse(inside, None, in_reasoning=True, final=True) == parsed
