"""One form of a message before any template sees it: what is meant, and what is refused by its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ingest.tokens import message_form
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import chain_all, in_form, normal
from rollbook.ingest.tokens.tree import TurnTree, grown, left_out
from rollbook.ingest.turns.model_call import check_messages
from rollbook.store.errors import RequestError

from .test_real_templates import NAMES, ONE_OF_EACH, STOCK, TOOLS

RealChat = Callable[[str], ChatTokenizer]

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

MEANT: list[tuple[Any, Any]] = [
    (None, ""),
    ([], ""),
    ("a", "a"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
    (["a", {"text": "b"}], "ab"),
    ([{"type": "refusal", "refusal": "no"}], "no"),
    (["a", IMAGE], [{"type": "text", "text": "a"}, IMAGE]),
    ([{"type": "input_image", "image_url": "u"}], [{"type": "image_url", "image_url": {"url": "u"}}]),
]


@pytest.mark.parametrize(("content", "form"), MEANT)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_that_can_be_meant(role: str, content: Any, form: Any) -> None:
    """Every shape of a text is that text, for matching as for templates."""
    message = {"role": role, "content": content}
    sent = copy.deepcopy(message)
    assert in_form(message)["content"] == form
    assert message == sent
    assert normal(message) == normal({"role": role, "content": form})


REFUSED: list[tuple[Any, str]] = [
    ({"content": 5}, "messages[0].content is 5"),
    ({"content": True}, "messages[0].content is true"),
    ({"content": {"type": "text", "text": "a"}}, "messages[0].content is an object"),
    ({"content": [5]}, "messages[0].content[0] is 5"),
    ({"content": [None]}, "messages[0].content[0] is null"),
    ({"content": ["a", {"type": "text", "text": None}]}, "messages[0].content[1].text is null"),
    ({"content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text is 5"),
    ({"content": [{"type": "text"}]}, "messages[0].content[0].text is null"),
    (
        {"content": [{"type": "input_audio", "input_audio": {}}]},
        'messages[0].content[0].type is "input_audio"',
    ),
    ({"content": [{"type": "file", "file": {}}]}, 'messages[0].content[0].type is "file"'),
    ({"content": [{"type": "video_url", "video_url": {}}]}, 'messages[0].content[0].type is "video_url"'),
    ({"content": [{"type": ["text"], "text": "a"}]}, "messages[0].content[0].type is a list"),
    ({"content": [{"a": 1}]}, "messages[0].content[0].type is null"),
    ({"content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].image_url is an object"),
    ({"name": 5}, "messages[0].name is 5"),
    ({"tool_call_id": ["c"]}, "messages[0].tool_call_id is a list"),
    ({"tool_calls": [{"id": "c"}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("fields", "place"), REFUSED)
def test_content_that_cannot_be_meant(fields: Any, place: str) -> None:
    """A 400 that names the place and what stands there."""
    with pytest.raises(RequestError) as refused:
        check_messages([{"role": "user", "content": "x"} | fields])
    assert refused.value.status == 400
    assert place in refused.value.message


def _called(**call: Any) -> Any:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}} | call]}


REFUSED_CALLS: list[tuple[Any, str]] = [
    (_called(id=["c"]), "tool_calls[0].id is a list"),
    (_called(id=5), "tool_calls[0].id is 5"),
    (_called(type="custom"), 'tool_calls[0].type is "custom"'),
    (_called(function=None), "tool_calls[0].function is null"),
    (_called(function={"name": 5}), "tool_calls[0].function.name is 5"),
    (_called(function={"name": "f", "arguments": [1]}), "tool_calls[0].function.arguments is a list"),
    (_called(function={"name": "f", "arguments": 1}), "tool_calls[0].function.arguments is 1"),
    ({"role": "assistant", "tool_calls": {}}, "tool_calls is an object"),
    ({"role": "assistant", "function_call": "f"}, "function_call is"),
    ({"role": "assistant", "function_call": {"name": 5}}, "function_call.name is 5"),
    (_called() | {"function_call": {"name": "f"}}, "send one of them"),
    ({"role": "assistant", "reasoning": 5}, "reasoning is 5"),
    ({"role": "assistant", "reasoning": "a", "thinking": "b"}, "two different things"),
    ({"role": "assistant", "refusal": 5}, "refusal is 5"),
]


@pytest.mark.parametrize(("message", "place"), REFUSED_CALLS)
def test_calls_that_cannot_be_meant(message: Any, place: str) -> None:
    """Likewise for what the assistant is said to have said."""
    with pytest.raises(RequestError) as refused:
        check_messages([message, {"role": "user", "content": "x"}])
    assert refused.value.status == 400
    assert f"messages[0].{place}" in refused.value.message or place in refused.value.message


def test_what_the_assistant_said_has_one_form() -> None:
    """Older names, objects and nulls are the same call, the same refusal, the same thought."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    plain = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert in_form({"role": "assistant", "function_call": {"name": "f", "arguments": {"a": 1}}}) == plain
    assert in_form(plain | {"content": None, "function_call": None, "refusal": None, "audio": None}) == plain
    empty = call | {"function": {"name": "f", "arguments": None}}
    assert in_form(plain | {"tool_calls": [empty]})["tool_calls"][0]["function"]["arguments"] == "{}"
    assert in_form({"role": "assistant", "refusal": "no"})["content"] == "no"
    for name in ("reasoning_content", "reasoning", "thinking"):
        thought = in_form({"role": "assistant", "content": "a", name: "hm"})
        assert thought == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert "tool_calls" not in in_form({"role": "assistant", "content": "a", "tool_calls": []})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["text", "refusal"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "refusal", "image_url", "url", "function", "name", "id", "arguments"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
FIELDS = ["content", "name", "tool_calls", "tool_call_id", "refusal", "function_call", "thinking", "x"]


@given(
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
@settings(max_examples=400)
def test_any_message_has_its_form_or_none(role: str, fields: dict[str, Any]) -> None:
    """Only our own error is raised; a form is the form of itself, and of the same text for matching."""
    message = fields | {"role": role}
    normal(message)
    try:
        form = in_form(message)
    except RequestError:
        return
    assert in_form(form) == form
    assert normal(form) == normal(message)
    assert isinstance(form["content"], str) or all(
        p["type"] in ("text", "image_url") for p in form["content"]
    )


# Over real templates -------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[str], Any]] = {
    "text": lambda text: text,
    "parts": lambda text: [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}],
    "input_text": lambda text: [{"type": "input_text", "text": text}],
    "bare": lambda text: [text[:4], text[4:]],
    "untyped": lambda text: [{"text": text}],
    "refusal": lambda text: [{"type": "refusal", "refusal": text}],
}


def _conversation(
    shape: Callable[[str], Any], *, tools: bool, system: bool
) -> tuple[list[Any], dict[str, str]]:
    """(messages, text -> role)"""
    messages: list[Any] = []
    texts: dict[str, str] = {}

    def say(role: str, **more: Any) -> None:
        text = f"sentinel{len(texts):03d}"
        texts[text] = role
        messages.append({"role": role, "content": shape(text)} | more)

    if system:
        say("system")
    say("user")
    if tools:
        call = {"name": "look", "arguments": {"what": "argument"}}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            }
        )
        say("tool", tool_call_id="call00001")
    say("assistant")
    say("user")
    return messages, texts


@pytest.mark.more_but(*ONE_OF_EACH)
@pytest.mark.parametrize("name", NAMES)
def test_no_text_vanishes_without_a_word(real_chat: RealChat, name: str) -> None:
    """Each shape of a text is in the prompt of each template, and all of them make the same prompt.

    What a template leaves out by a rule of its own is told; or it refuses the messages, which is told too.
    """
    tokenizer = real_chat(name)
    rendered = 0
    for tools in (False, True):
        for system in (False, True):
            texts: set[str] = set()
            for shape in SHAPES.values():
                messages, roles = _conversation(shape, tools=tools, system=system)
                check_messages(messages)
                text = _rendered(tokenizer, messages, TOOLS if tools else None)
                if text is None:
                    continue
                rendered += 1
                texts.add(text)
                lost = left_out(text, messages, tokenizer.traits, TOOLS if tools else None)
                for sentinel, role in roles.items():
                    assert sentinel in text or f"messages.{role}.content" in lost
                assert "{'" not in text
                if tools and "argument" not in text:
                    assert "messages.assistant.tool_calls" in lost
            assert len(texts) <= 1
    assert rendered


VANISHES: list[tuple[str, Any, str]] = [
    # What the templates do by rules of their own; the message is the only one of its kind.
    (
        "qwen2_5",
        [{"role": "assistant", "content": "a", "reasoning_content": "gone"}],
        "assistant.reasoning_content",
    ),
    ("gptoss", [{"role": "assistant", "content": "a", "thinking": "gone"}], "assistant.reasoning_content"),
    ("gptoss", [{"role": "user", "content": "u"}, {"role": "system", "content": "gone"}], "system.content"),
    ("qwen2_5", [{"role": "user", "content": "u", "name": "gone"}], "user.name"),
    ("qwen2_5", [{"role": "user", "content": [{"text": "u", "extra": "gone"}]}], "user.content.extra"),
    ("deepseekv3", [{"role": "assistant", "content": "gone</think>a"}], "assistant.content"),
    (
        "qwen3",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "custom": {"input": ["gone"]}}]}],
        "assistant.tool_calls.custom",
    ),
    (
        "qwen3",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "why": "gone"}, "id": "other"}]}],
        "assistant.tool_calls.why",
    ),
]


@pytest.mark.parametrize(("name", "messages", "listed"), VANISHES)
def test_what_a_template_leaves_out_is_told(
    real_chat: RealChat, name: str, messages: Any, listed: str
) -> None:
    """By its role and field; and what it shows is not."""
    tokenizer = real_chat(name)
    messages = [*messages, {"role": "user", "content": "here"}]
    text = tokenizer.render(messages, None, generate=True)
    assert "gone" not in text.replace("gone</think>", "")
    assert left_out(text, messages, tokenizer.traits) == (f"messages.{listed}",)


def test_tools_and_settings_that_a_template_does_not_read_are_told(real_chat: RealChat) -> None:
    """A template without tools leaves them all out; settings that it has no name for do nothing."""
    messages = [{"role": "user", "content": "here"}]
    for name, expected in (("llama3", ("chat_template_kwargs.enable_thinking", "tools")), ("qwen3", ())):
        tokenizer = real_chat(name)
        text = tokenizer.render(messages, TOOLS, generate=True)
        assert left_out(text, messages, tokenizer.traits, TOOLS, {"enable_thinking": False}) == expected


def test_a_long_search_ends(real_chat: RealChat) -> None:
    """Looking for what is not there takes a bounded time, however much of it there is."""
    traits = real_chat("qwen3").traits
    text = "ab" * 200_000
    messages = [{"role": "tool", "content": f"b{'a' * (i % 50)}x{i}"} for i in range(20_000)]
    assert left_out(text, messages, traits) == ("messages.tool.content",)


# What a template reads ------------------------------------------------------------------------------


def test_reasoning_comes_under_the_name_that_a_template_reads(real_chat: RealChat) -> None:
    """gpt-oss and LFM2.5 read `thinking`; whichever name the client uses, the model sees its analysis."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for name in ("gptoss", "lfm2_2_5", "qwen3", "glm4moe", "gemma4"):
        texts = set()
        for field in ("reasoning_content", "reasoning", "thinking"):
            reply = {"role": "assistant", "content": None, "tool_calls": [call], field: "my analysis"}
            result = {"role": "tool", "tool_call_id": "call00001", "content": "it"}
            messages = [{"role": "user", "content": "go"}, reply, result]
            texts.add(real_chat(name).render(messages, TOOLS, generate=True))
        assert len(texts) == 1
        assert "my analysis" in texts.pop()


@pytest.mark.more
def test_traits_of_real_templates(real_chat: RealChat) -> None:
    """What some of them are known to do."""
    traits = {name: real_chat(name).traits for name in STOCK}
    assert {n for n, t in traits.items() if not t.dict_arguments} == {"deepseekv3", "deepseek_r1_distill"}
    assert {n for n, t in traits.items() if t.null_beside_calls} == {"deepseek_r1_distill"}
    assert {n for n, t in traits.items() if not t.thinks_beside_calls} == {"gptoss"}
    assert {n for n, t in traits.items() if t.text_as_parts} == {"idefics3", "smolvlm", "llava_next"}
    assert {n for n, t in traits.items() if t.reasoning == "thinking"} == {"gptoss", "lfm2_2_5"}
    readers = {n for n, t in traits.items() if t.reads("tool", "tool_call_id")}
    assert readers >= {"gemma4", "muse_glimmer"}
    assert "qwen3" not in readers
    assert traits["qwen3_vl"].image_type == "image_url"
    assert traits["smolvlm"].image_type == "image"
    assert traits["qwen3"].image_type is None


NAMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
DUMPED = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>{% endfor %}"


def test_a_template_that_writes_messages_out_reads_every_field(chat: Callable[[str], ChatTokenizer]) -> None:
    """Whatever stands in a message counts then."""
    from rollbook.ingest.tokens.chat_template import compile_template
    from rollbook.ingest.tokens.template_traits import ANY, probed

    traits = probed(compile_template(DUMPED), DUMPED, {})
    assert traits.counted is not None
    assert all(ANY in traits.counted[place] for place in ("system", "user", "assistant", "tool", "call"))
    named = probed(compile_template(NAMED), NAMED, {})
    assert named.counted == {role: frozenset({"name"}) for role in ("system", "user", "assistant", "tool")}


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "tool", "system", "developer"]),
            "content": st.sampled_from(["a", "b"]),
        },
        optional={
            "name": st.sampled_from(["x", "y", None]),
            "tool_call_id": st.sampled_from(["call00001", "z"]),
            "tool_responses": st.sampled_from(["p", "q"]),
            "recipient": st.sampled_from(["p", "q"]),
        },
    ),
    min_size=1,
    max_size=2,
)
READERS = ("qwen3", "gemma4", "gemma4_v2", "muse_glimmer", "gptoss", "llama3_1", "lfm2_2_5")


@given(st.sampled_from(READERS), MESSAGES, MESSAGES)
@settings(max_examples=300)
def test_requests_that_match_render_alike(real_chat: RealChat, name: str, one: Any, other: Any) -> None:
    """What goes on from a turn is, up to there, the same prompt under this template."""
    tokenizer = real_chat(name)
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "look", "arguments": '{"what": "it"}'},
    }
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    head = [{"role": "user", "content": "go"}, message]
    one, other = [*head, *one], [*head, *other]
    reply = {"role": "assistant", "content": "done"}
    tree = TurnTree()
    ids = tokenizer.encode("x")
    tree.add(grown("t", "k", one, chain_all(one), reply, None, (ids, ids)))
    shown = [*other, reply, {"role": "user", "content": "on"}]
    parents = tree.parents(shown, chain_all(shown), "k", tokenizer.traits)
    if one == other:
        assert [c.turn.turn_id for c in parents] == ["t"]
    if parents:
        assert _rendered(tokenizer, one) == _rendered(tokenizer, other)


def _rendered(tokenizer: ChatTokenizer, messages: Any, tools: Any = TOOLS) -> str | None:
    try:
        return tokenizer.render(messages, tools, generate=True)
    except RequestError:
        return None


_ODD = st.sampled_from([None, "", "x", [], {}, 0, False])
_FUNCTIONS = st.fixed_dictionaries(
    {}, optional={"name": st.sampled_from(["f", None]), "arguments": st.sampled_from(["{}", "", {}, None])}
)
_CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", None, 3, ""]),
        "type": st.sampled_from(["function", "", None, "custom"]),
        "function": _FUNCTIONS | st.none(),
        "index": st.sampled_from([0, None]),
    },
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.sampled_from(["hi", ""])},
    optional={
        "tool_calls": st.lists(_CALLS, max_size=2) | _ODD,
        **dict.fromkeys(("name", "tool_call_id", "refusal", "reasoning_content", "more"), _ODD),
    },
)


@given(_MESSAGES)
def test_what_has_the_form_is_left_as_it_is(message: dict[str, Any]) -> None:
    """A message that is given back itself is what forming it anew would give."""
    if message_form._is_formed(message):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_form, "_is_formed", lambda _: False)
            assert in_form(message) == message
        assert in_form(message) is message


def test_what_clients_send_has_the_form() -> None:
    """Calls and their results as OpenAI's SDK writes them are not formed anew."""
    function = {"name": "look", "arguments": "{}"}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    for message in (call, {"role": "tool", "tool_call_id": "a", "content": "found"}):
        assert in_form(message) is message
