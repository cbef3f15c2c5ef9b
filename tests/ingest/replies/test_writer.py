"""Replies made of text: what each family writes is read back from its ids, or refused by name; never anything
else.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollbook.ingest.replies.choose import FAMILIES, detect_family, opens_reasoning
from rollbook.ingest.replies.family import Call, Parsed, ReplyContext
from rollbook.ingest.replies.written import ReplyWriter, Written
from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.turns.reply import ReplyReader
from rollbook.store.errors import ReplyError, RequestError

from .test_round_trip import MARKS, MISTRAL

ASKED = [{"role": "user", "content": "Hi"}]


def _call(name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _calls(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [call | {"id": f"call0000{i}"} for i, call in enumerate(calls)]


ONE = _calls(_call(s="x", n=5))
KINDS: dict[str, dict[str, Any]] = {
    "text": {"content": "It is four."},
    "reasoning": {"content": "It is four.", "reasoning_content": "Two and two."},
    "one call": {"content": None, "tool_calls": ONE},
    "parallel calls": {
        "content": "",
        "tool_calls": _calls(_call(s="x", n=5), _call("g", q="5", t=[1, None])),
    },
    "calls with text": {"content": "So:", "tool_calls": ONE},
    "unicode": {"content": "é天🌦 “x”\n\tü {'k': 1}"},
    "empty": {"content": ""},
    "long": {"content": "word {'k': 1}\n" * 300 + "end"},
}
EVERYTHING = "said said said said said said said said"
OUTCOMES = {
    # text, reasoning, one call, parallel calls, calls with text, unicode, empty, long
    "qwen2_5": "said reasoning said said said said said said",
    "qwen3": EVERYTHING,
    "qwen3_6": EVERYTHING,
    "nemotron_3_nano": EVERYTHING,
    "deepseekv3": EVERYTHING,
    "deepseek_r1_distill": EVERYTHING,
    "glm4moe": EVERYTHING,
    "gptoss": "said said said calls said said said said",
    "mistral_array": "said reasoning said said said said said said",
    "mistral_named": "said reasoning said said said said said said",
    "llama3_1": "said reasoning said calls calls said said said",
    "llama3": "said reasoning calls calls calls said said said",
    "lfm2_2_5": EVERYTHING,
    "lfm2": "said reasoning calls calls calls said said said",
    "phi3": "said reasoning calls calls calls said said said",
    "gemma3": "said reasoning calls calls calls said said said",
    "cohere2": "said reasoning calls calls calls said said said",
}
"""Of the kinds of replies, which are said, and for which part a reply is refused."""
OTHERS = (
    *("cohere", "gemma4_v5", "idefics3", "lfm2_v2", "llava_next", "muse_glimmer", "nemotron_3_ultra"),
    *("qwen2_5_vl", "qwen3_5_nothink", "qwen3_instruct_2507", "qwen3_vl", "smolvlm"),
)

Writers = Callable[..., ReplyWriter]


@pytest.fixture(scope="module")
def writer(real_chat: Callable[..., ChatTokenizer]) -> Writers:
    """Writers of real chat templates over Qwen's tokenizer."""

    def get(name: str, *leave_out: str) -> ReplyWriter:
        tokenizer = real_chat(name, MISTRAL.get(name))
        return ReplyWriter(tokenizer, FAMILIES[detect_family(tokenizer.template_source)], leave_out)

    return get


def _offered(reply: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A tool for each call, its schema as the arguments are."""
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object", bool: "boolean"}
    tools = []
    for call in reply.get("tool_calls") or ():
        values = json.loads(call["function"]["arguments"]).items()
        properties = {key: {"type": names.get(type(value), "null")} for key, value in values}
        function = {"name": call["function"]["name"], "description": "Does."}
        schema = {"parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function | schema})
    return tools or None


def _plain(text: str | None) -> str:
    return unicodedata.normalize("NFC", (text or "").strip(" \t\r\n"))


def _write(writer: ReplyWriter, reply: dict[str, Any]) -> Written:
    return writer.write(ASKED, _offered(reply), {"role": "assistant", **reply})


def _check(writer: ReplyWriter, written: Written, reply: dict[str, Any]) -> None:
    """A proxy that had sampled these ids would have sent this reply, and the engine stopped at their end."""
    ids, tokenizer = written.ids.tolist(), writer.tokenizer
    assert ids[-1] in tokenizer.stop_ids
    assert not set(ids[:-1]) & set(tokenizer.stop_ids)
    reader = ReplyReader(tokenizer, writer.family, _offered(reply), opens_reasoning(written.prompt))
    read = reader.reply(written.ids, "stop", "turn").message
    assert _plain(read["content"]) == _plain(reply["content"])
    assert _plain(read.get("reasoning_content")) == _plain(reply.get("reasoning_content"))
    calls = [[call["function"] for call in message.get("tool_calls") or ()] for message in (read, reply)]
    assert [call["name"] for call in calls[0]] == [call["name"] for call in calls[1]]
    arguments = [[json.dumps(json.loads(c["arguments"]), sort_keys=True) for c in some] for some in calls]
    assert arguments[0] == arguments[1]


def _outcome(writer: ReplyWriter, reply: dict[str, Any]) -> str:
    """`said`, if it is read back from the ids; else the parts for which it is refused."""
    try:
        written = _write(writer, reply)
    except ReplyError as error:
        return " and ".join(error.parts)
    _check(writer, written, reply)
    return "said"


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_kind_of_reply_is_said_or_refused_by_name(writer: Writers, name: str) -> None:
    """Held as a table, so that a family cannot come to refuse more, or say what it did not, unseen."""
    assert " ".join(_outcome(writer(name), reply) for reply in KINDS.values()) == OUTCOMES[name]


def test_the_page_says_so(root: Path) -> None:
    """The table of docs/importing.md is this one."""
    page = (root / "docs" / "importing.md").read_text()
    rows = re.findall(r"^\| .*\(`(\w+)`\) \| `(\w+)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", page, re.M)
    table = {name: [{"yes": True, "no": False}[word] for word in words] for name, _, *words in rows}
    assert table == {name: [word == "said" for word in row.split()[1:5]] for name, row in OUTCOMES.items()}


def test_other_templates_of_the_corpus(writer: Writers, corpus: dict[str, str]) -> None:
    """Of other forms: read back as it was meant, or refused. None but Muse's refuses text alone."""
    others = [name for name in corpus if name in OTHERS]
    kinds = ("text", "reasoning", "calls with text")
    outcomes = {name: [_outcome(writer(name), KINDS[kind]) for kind in kinds] for name in others}
    refusing = {name for name, results in outcomes.items() if results[0] != "said" or "text" in results}
    assert len(others) == len(OTHERS)
    assert refusing == {"muse_glimmer"}


CALL = '{"s": "x", "n": 5}'
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" + CALL + "\n```<｜tool▁call▁end｜>"
ONE_OF_GLM = (
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("qwen3", "reasoning", "<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"),
        ("deepseekv3", "text", "\n</think>\n\nIt is four.<｜end▁of▁sentence｜>"),
        ("deepseekv3", "reasoning", "Two and two.\n</think>\n\nIt is four.<｜end▁of▁sentence｜>"),
        (
            "deepseek_r1_distill",
            "calls with text",
            f"\n</think>\n\nSo:<｜tool▁calls▁begin｜>{FENCED}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        ),
        ("nemotron_3_nano", "text", "\n</think>\nIt is four.<|im_end|>"),
        ("nemotron_3_ultra", "text", "</think>It is four.<|im_end|>"),
        ("glm4moe", "text", "\n<think></think>\nIt is four.<|user|>"),
        ("glm4moe", "one call", f"\n<think></think>\n{ONE_OF_GLM}<|observation|>"),
        ("gptoss", "text", "<|channel|>final<|message|>It is four.<|return|>"),
        ("gptoss", "one call", f" to=functions.f<|channel|>commentary json<|message|>{CALL}<|call|>"),
        (
            "gptoss",
            "calls with text",
            "<|channel|>commentary<|message|>So:<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{CALL}<|call|>",
        ),
        ("phi3", "text", "It is four.<|end|>"),
        ("llama3_1", "one call", f'{{"name": "f", "parameters": {CALL}}}<|eot_id|>'),
        ("lfm2", "text", "It is four.<|im_end|>"),
    ],
)
def test_what_is_written(writer: Writers, name: str, kind: str, text: str) -> None:
    """To the letter, where templates leave the most to know."""
    assert _write(writer(name), KINDS[kind]).text == text


@pytest.mark.parametrize("name", ["llama3", "lfm2", "phi3"])
def test_a_call_that_the_template_leaves_out(writer: Writers, name: str) -> None:
    """Refused; left out on request, where something is left; never an empty reply."""
    with pytest.raises(
        ReplyError, match=r"the reply's calls cannot be said with the chat template of"
    ) as refused:
        _write(writer(name), KINDS["one call"])
    assert refused.value.parts == ("calls",)
    with pytest.raises(ReplyError, match="without its calls the reply says nothing"):
        _write(writer(name, "calls"), KINDS["one call"])
    written = _write(
        writer(name, "calls", "reasoning"), KINDS["calls with text"] | {"reasoning_content": "Hm"}
    )
    assert written.left_out == ("reasoning", "calls")
    assert written.reply == {"role": "assistant", "content": "So:"}
    _check(writer(name), written, {"content": "So:"})


def test_only_what_cannot_be_said_is_left_out(writer: Writers) -> None:
    """Of two parts that may go, the one that has to."""
    both = KINDS["calls with text"] | {"reasoning_content": "Hm"}
    assert _write(writer("qwen3", "calls", "reasoning"), both).left_out == ()
    assert _write(writer("qwen2_5", "calls", "reasoning"), both).left_out == ("reasoning",)
    with pytest.raises(ReplyError, match="reasoning and calls"):
        _write(writer("llama3", "calls"), both)


def test_reasoning_that_stands_in_the_text(writer: Writers) -> None:
    """As it was sampled: it is the reasoning, whichever way the template knows of it."""
    for name in ("qwen2_5", "qwen3", "qwen3_6", "nemotron_3_nano", "deepseek_r1_distill", "glm4moe"):
        apart = {"content": "Four.", "reasoning_content": "Hm"}
        for content in ("<think>\nHm\n</think>\n\nFour.", "<think>Hm</think>Four."):
            _check(writer(name), _write(writer(name), {"content": content}), apart)
    # Copied from behind a prompt that opens the block.
    _check(writer("deepseekv3"), _write(writer("deepseekv3"), {"content": "Hm\n</think>\n\nFour."}), apart)
    closed = writer("qwen3_5_nothink", "reasoning")
    assert _write(closed, {"content": "<think>Hm</think>Four."}).reply["content"] == "Four."


@pytest.mark.parametrize(
    ("name", "reply", "reason"),
    [
        ("qwen2_5", {"content": "a<|im_end|>b"}, "text"),
        ("qwen2_5", {"content": "a<|im_start|>b"}, "text"),
        ("qwen2_5", {"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}, "image"),
        (
            "qwen2_5",
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments",
        ),
        ("glm4moe", {"content": "", "tool_calls": [_call("f g", s="x")]}, "calls"),
    ],
)
def test_what_no_model_samples(writer: Writers, name: str, reply: dict[str, Any], reason: str) -> None:
    """Control tokens inside of a reply, images, arguments that are none, names that end early."""
    with pytest.raises(ReplyError, match=reason):
        writer(name).write(ASKED, None, {"role": "assistant", **reply})


def test_a_model_that_stops_elsewhere(writer: Writers) -> None:
    """The end is the engine's: a GLM that stops at one token alone, a Phi that stops at its second."""
    for name, stop in (("glm4moe", "<|endoftext|>"), ("phi3", "<|endoftext|>")):
        usual = writer(name)
        stop_ids = (usual.tokenizer.tokenizer.token_to_id(stop),)
        other = replace(usual, tokenizer=replace(usual.tokenizer, stop_ids=stop_ids))
        written = _write(other, KINDS["text"])
        assert written.text.endswith(stop)
        _check(other, written, KINDS["text"])
    without = replace(
        writer("gptoss").tokenizer, stop_ids=(usual.tokenizer.tokenizer.token_to_id("<|return|>"),)
    )
    assert _write(replace(writer("gptoss"), tokenizer=without), KINDS["one call"]).text.endswith("<|call|>")


def test_the_end_of_a_text_is_the_templates(writer: Writers) -> None:
    """Llama's models name three stops, the first of which ends no turn; pieces get the right one."""
    for name, end in (("llama3_1", "<|eot_id|>"), ("glm4moe", "<|user|>"), ("gptoss", "<|return|>")):
        usual = writer(name)
        known = usual.tokenizer.tokenizer.token_to_id
        stop_ids = (known("<|endoftext|>"), *usual.tokenizer.stop_ids)
        other = replace(usual, tokenizer=replace(usual.tokenizer, stop_ids=stop_ids))
        assert other.end_of_text == known(end)
        assert _write(other, KINDS["text"]).ids[-1] == known(end)


def test_a_template_that_shows_no_reply(writer: Writers) -> None:
    """Nothing to go by: refused, and not with the family's form alone."""
    usual = writer("qwen2_5")
    silent = replace(usual.tokenizer, template=compile_template("{{ messages[0].content }}<|im_end|>"))
    with pytest.raises(ReplyError, match="end-of-turn"):
        _write(replace(usual, tokenizer=silent), KINDS["text"])


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ODD = WORDS | st.sampled_from(MARKS) | st.sampled_from(MARKS).map(lambda mark: f"a {mark} b")
VALUES = ODD | st.integers(-(2**53), 2**53) | st.booleans() | st.lists(st.integers(0, 9), max_size=2)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=3)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=2)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=ODD, reasoning=st.none() | ODD, calls=CALLS)
@pytest.mark.parametrize("name", OUTCOMES)
def test_any_reply_is_read_back_or_refused(
    writer: Writers, name: str, content: str, reasoning: str | None, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """Over texts full of markers: what is said is what was meant."""
    assume(len({name for name, _ in calls}) == len(calls))
    reply: dict[str, Any] = {"content": content}
    reply |= {"reasoning_content": reasoning} if reasoning else {}
    reply |= {"tool_calls": _calls(*(_call(n, **a) for n, a in calls))} if calls else {}
    try:
        written = _write(writer(name), reply)
    except (ReplyError, RequestError):
        return
    if "reasoning_content" in reply or not any(mark in content for mark in MARKS):
        _check(writer(name), written, reply)


@settings(max_examples=25, deadline=None)
@given(content=st.from_regex(r"[a-z]{0,5}( [a-z,é天]{1,6}){0,4}", fullmatch=True), calls=CALLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_writer_writes_what_its_parser_reads(name: str, content: str, calls: Any) -> None:
    """Whatever form a template of the family shows."""
    family = FAMILIES[name]
    assume(all(not any(m in json.dumps(a, ensure_ascii=False) for m in MARKS) for _, a in calls))
    expected = tuple(Call(n, json.dumps(a, ensure_ascii=False)) for n, a in calls)
    offered = _offered({"tool_calls": [_call(n, **a) for n, a in calls]})
    for form in (
        "<think>",
        "<think>```json",
        "<think>[ARGS]",
        "<think>｜DSML｜",
        "<think>｜DSML｜tool_calls",
    ):
        for prompt, opened in (("user:", False), ("user:<think>\n", True), ("user:<think>", True)):
            parts = Parsed("It thinks", content, expected)
            text = family.write(parts, ReplyContext(prompt, form))
            if text is None:
                assert name == "plain" or (name in ("llama_json", "gpt_oss") and expected)
                continue
            read = family.parse(text, offered, in_reasoning=opened and name != "gpt_oss", final=True)
            assert (read.reasoning, read.content) == ("It thinks", content.rstrip() if expected else content)
            assert [(c.name, json.loads(c.arguments)) for c in read.calls] == [
                (c.name, json.loads(c.arguments)) for c in expected
            ]
