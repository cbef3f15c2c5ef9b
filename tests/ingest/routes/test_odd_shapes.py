"""Bodies of odd shapes: never a fault, and after a 200 every text is in the prompt or named as left out."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess

NUMBERS = itertools.count()
MARK = re.compile(r"q\d+q")
TEMPLATES = ("chatml", "rewriting", "hides_content")


@pytest.fixture(scope="module")
def proxies(played: Callable[..., InProcess]) -> Any:
    """Proxies that say Hello, by their template."""
    return {name: played(max_body_mb=1, template=name) for name in TEMPLATES}


@pytest.fixture(scope="module")
def proxy(proxies: Any) -> Any:
    """The one whose template shows everything."""
    return proxies["chatml"]


TEXT = st.builds(lambda: f"q{next(NUMBERS)}q")
"""Texts that are told apart wherever they come out."""
ODD = st.none() | st.booleans() | st.integers(-5, 5) | st.just({}) | st.just([]) | TEXT
ID = st.none() | st.sampled_from(["c1", "c2", ""]) | st.sampled_from([5, ["c1"], {"a": 1}])


def _mostly(sound: Any, odd: Any) -> Any:
    """One odd thing in nine: a body has many, and most are to be answered."""
    return st.integers(0, 8).flatmap(lambda drawn: odd if drawn == 0 else sound)


KIND = st.sampled_from(
    [
        *(
            "text",
            "input_text",
            "output_text",
            "summary_text",
            "refusal",
            "image_url",
            "input_image",
            "image",
        ),
        *("input_audio", "file", "video_url", "document", "thinking", "redacted_thinking", "tool_use", None),
        *("tool_result", "server_tool_use", 5, ["text"]),
    ]
)
PART = _mostly(
    st.builds(lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text"]), TEXT)
    | st.builds(lambda text: {"text": text}, TEXT)
    | TEXT,
    st.builds(
        lambda kind, name, text: {"type": kind, name: text},
        KIND,
        st.sampled_from(["text", "refusal", "input_audio", "thinking", "image_url", "content", "data"]),
        ODD,
    )
    | ODD,
)
CONTENT = _mostly(TEXT | st.lists(PART, max_size=3), ODD)
FUNCTION = st.fixed_dictionaries(
    {"name": _mostly(TEXT, ODD)},
    optional={
        "arguments": _mostly(
            st.builds(lambda text: json.dumps({"a": [text], "b": 1}), TEXT)
            | st.builds(lambda text: {"a": text}, TEXT),
            ODD,
        )
    },
)
CALL = st.fixed_dictionaries(
    {"function": _mostly(FUNCTION, ODD)},
    optional={"id": ID, "type": _mostly(st.just("function"), ODD), "custom": ODD},
)
MESSAGE = st.fixed_dictionaries(
    {"role": _mostly(st.sampled_from(["system", "developer", "user", "tool", "function"]), ODD)},
    optional={"content": CONTENT, "name": _mostly(TEXT, ODD), "tool_call_id": ID, "extra": ODD},
)
SAID = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": CONTENT,
        "refusal": _mostly(TEXT, ODD),
        "reasoning_content": _mostly(TEXT, ODD),
        "thinking": _mostly(st.none(), ODD),
        "tool_calls": _mostly(st.lists(_mostly(CALL, ODD), max_size=2), ODD),
        "function_call": _mostly(st.none(), FUNCTION | ODD),
        "audio": ODD,
    },
)
USER = st.fixed_dictionaries({"role": st.just("user"), "content": TEXT})
BLOCK = PART | st.fixed_dictionaries(
    {"type": st.sampled_from(["tool_use", "tool_result", "thinking", "image"])},
    optional={
        "id": ID,
        "tool_use_id": ID,
        "name": _mostly(TEXT, ODD),
        "input": _mostly(st.builds(lambda text: {"a": text}, TEXT), ODD),
        "thinking": _mostly(TEXT, ODD),
        "content": CONTENT,
        "is_error": ODD,
        "source": ODD,
    },
)
BLOCKS = _mostly(TEXT | st.lists(BLOCK, max_size=3), ODD)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", None])},
    optional={
        "role": _mostly(st.sampled_from(["user", "assistant", "system"]), ODD),
        "content": CONTENT,
        "summary": _mostly(st.lists(st.builds(lambda s: {"text": s}, TEXT) | TEXT, max_size=2), ODD),
        "call_id": ID,
        "name": _mostly(TEXT, ODD),
        "arguments": _mostly(st.builds(lambda s: json.dumps({"a": s}), TEXT), ODD),
        "output": CONTENT,
    },
)
KWARGS = st.dictionaries(
    st.sampled_from(
        ["enable_thinking", "messages", "tools", "generate", "self", "bos_token", "range", "1a", ""]
    ),
    ODD,
    max_size=2,
)
BODIES: dict[str, Any] = {
    "chat": st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE | SAID, max_size=3).flatmap(lambda m: USER.map(lambda u: [*m, u]))},
        optional={"chat_template_kwargs": _mostly(st.just({}), KWARGS), "max_tokens": st.just(4)},
    ),
    "messages": st.fixed_dictionaries(
        {
            "max_tokens": st.just(4),
            "messages": st.lists(
                st.fixed_dictionaries(
                    {"role": _mostly(st.sampled_from(["user", "assistant"]), ODD)},
                    optional={"content": BLOCKS},
                ),
                max_size=3,
            ).flatmap(lambda m: USER.map(lambda u: [*m, u])),
        },
        optional={"system": BLOCKS},
    ),
    "responses": st.fixed_dictionaries(
        {"input": st.lists(ITEM, max_size=4).flatmap(lambda i: USER.map(lambda u: [*i, u]))},
        optional={"instructions": _mostly(TEXT, ODD), "max_output_tokens": st.just(4)},
    ),
    "completions": st.fixed_dictionaries(
        {
            "prompt": _mostly(
                TEXT | st.lists(st.integers(0, 300), min_size=1, max_size=4),
                st.lists(st.integers(-2, 500) | st.floats(0, 9) | st.booleans() | TEXT, max_size=4) | ODD,
            )
        },
        optional={
            "max_tokens": st.just(4),
            "logit_bias": st.dictionaries(st.sampled_from(["1", "-1", "x", "99999", "1.5", "٣"]), st.just(1)),
        },
    ),
}


def _check(proxy: Any, kind: str, body: Any) -> int:
    """Send it; the status."""
    reply = proxy.ask(f"/t/odd{next(NUMBERS)}{PATHS[kind]}", json.dumps(body).encode())
    assert reply.error is None, repr(reply.error)
    if reply.status != 200:
        assert reply.status == 400, (reply.status, reply.data)
        assert reply.json["error"]["message"]
        return reply.status
    prompt = proxy.engine.prompts[-1]
    text = proxy.engine.tokenizer.decode(prompt.ids, special=True)
    ignored = unquote(reply.headers.get("x-rollbook-not-honoured", ""))
    lost = set(MARK.findall(json.dumps(body))) - set(MARK.findall(text))
    assert not lost or ignored, (lost, body, text)
    if kind == "chat":
        for index, message in enumerate(body["messages"]):
            role = message["role"]
            for field, value in message.items():
                gone = set(MARK.findall(json.dumps(value))) & lost
                assert not gone or f"messages.{role}" in ignored, (index, field, ignored, text)
    for odd in ("{'", "None", "True"):
        assert odd not in text or kind == "completions"  # ids may spell anything
    return 200


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck), derandomize=False)
def test_a_200_means_that_every_text_is_there(proxies: Any, kind: str, data: Any) -> None:
    """Whatever shape a message has, and whatever the template makes of it."""
    body = data.draw(BODIES[kind])
    for name in TEMPLATES if kind == "chat" else TEMPLATES[:1]:
        _check(proxies[name], kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_many_of_the_bodies_are_answered(proxy: Any, kind: str) -> None:
    """What is drawn above is not refused for the most part, or it would say little."""
    statuses: list[int] = []

    @given(BODIES[kind])
    @settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
    def draw(body: Any) -> None:
        statuses.append(_check(proxy, kind, body))

    draw()
    assert statuses.count(200) > len(statuses) / 10


# What is refused, by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["messages", "tools", "generate", "self", "add_generation_prompt", "bos_token"]
)
@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_names_that_are_not_free_are_a_400(proxy: Any, kind: str, name: str) -> None:
    """What the proxy gives to the template is not a request's to give."""
    body = asked(kind, chat_template_kwargs={name: "x"})
    reply = proxy.ask(f"/t/odd{next(NUMBERS)}{PATHS[kind]}", body)
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_template_kwargs")
    assert name in reply.json["error"]["message"]


def _deep(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [150, 240, 5000])
def test_what_is_nested_too_deep_is_never_a_fault(proxy: Any, depth: int) -> None:
    """Schemas, arguments and settings: answered, or a 400 in the API's own form."""
    raw = json.dumps
    deep = "".join('{"a":' for _ in range(depth)) + "1" + "}" * depth
    function = {"name": "f", "parameters": "DEEP"}
    bodies = [
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
        },
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": "DEEP"}},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "DEEP"}}]},
                {"role": "user", "content": "x"},
            ]
        },
    ]
    for body in bodies:
        sent = raw(body).replace('"DEEP"', deep).encode()
        reply = proxy.ask(f"/t/odd{next(NUMBERS)}{PATHS['chat']}", sent)
        assert reply.error is None
        assert reply.status in (200, 400), reply.data


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([1, 10**6], "prompt[1] is 1000000"),
        ([1, -1], "prompt[1] is -1"),
        ([1, 2**40], "prompt[1] is 1099511627776"),
        ([1.5], "prompt[0] is 1.5"),
        ([1, True], "prompt[1] is true"),
        ([1, None], "prompt[1] is null"),
    ],
)
def test_ids_that_the_model_does_not_have_are_a_400(proxy: Any, prompt: Any, place: str) -> None:
    """The client's mistake, by its place; no engine hears of it."""
    before = len(proxy.engine.prompts)
    reply = proxy.ask(f"/t/odd{next(NUMBERS)}{PATHS['completions']}", {"prompt": prompt})
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_prompt")
    assert place in reply.json["error"]["message"]
    assert len(proxy.engine.prompts) == before


def test_the_log_holds_what_was_sent(proxy: Any) -> None:
    """The one form is for templates: the record of a request is the client's own words."""
    name = f"odd{next(NUMBERS)}"
    sent = [
        {"role": "developer", "content": ["be ", {"type": "input_text", "text": "brief"}], "name": "boss"},
        {
            "role": "assistant",
            "content": None,
            "refusal": "no",
            "function_call": {"name": "f", "arguments": {}},
        },
        {"role": "function", "name": "f", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
    ]
    reply = proxy.ask(f"/t/{name}{PATHS['chat']}", {"messages": sent})
    assert reply.status == 200
    assert reply.headers["x-rollbook-not-honoured"] == "messages.developer.name,messages.function.name"
    trajectory = proxy.trajectories()[name]
    [turn] = trajectory.turns.values()
    assert trajectory.messages(turn) == sent
    text = proxy.engine.tokenizer.decode(proxy.engine.prompts[-1].ids, special=True)
    assert "be brief" in text
    assert "no" in text


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_another_api_are_told(proxy: Any, kind: str) -> None:
    """Where a conversation comes under another API's name, it is not in the prompt, and the reply says so."""
    foreign = {
        "chat": ["system", "input", "instructions", "prompt", "stop_sequences"],
        "messages": ["input", "instructions", "stop", "n", "prompt"],
        "responses": ["messages", "system", "prompt", "n", "stop"],
        "completions": ["messages", "system", "input"],
    }
    for name in foreign[kind]:
        value: Any = 2 if name == "n" else "gone"
        reply = proxy.ask(f"/t/odd{next(NUMBERS)}{PATHS[kind]}", asked(kind, **{name: value}))
        assert reply.status == 200, reply.data
        assert name in reply.headers["x-rollbook-not-honoured"].split(",")
