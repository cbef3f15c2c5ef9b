"""Chat completions: what is read of a request, what is told of what is not honoured, and images."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS, asked
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

from rollbook.store.events import BodyStored
from rollbook.store.fold.trajectory import fold

CHAT = PATHS["chat"]
NAMES = itertools.count()
CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


def _ask(proxy: Any, answer: Any = "Hello", **fields: Any) -> tuple[Any, Any]:
    """(the reply, its turn) of a request in a trajectory of its own."""
    name = f"c{next(NAMES)}"
    proxy.engine.answer = lambda *_: answer
    reply = proxy.ask(f"/t/{name}{CHAT}", asked("chat", **fields))
    assert reply.status == 200, reply.data
    turns = list(proxy.trajectories()[name].turns.values())
    return reply, turns[0]


def test_sampling_fields_reach_the_engine(proxy: InProcess) -> None:
    """By the names of OpenAI, vLLM and SGLang; the turn records what was asked of the engine."""
    fields: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "max_tokens": 50},
        **{"frequency_penalty": 0.2, "presence_penalty": -0.3, "repetition_penalty": 1.1, "min_tokens": 2},
        **{"stop": ["END"], "logit_bias": {"5": 1.5}},
    }
    _, turn = _ask(proxy, **fields)
    sampling = proxy.engine.samplings[-1]
    reached = {
        **{"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
        **{"min_p": sampling.min_p, "seed": sampling.seed, "max_tokens": sampling.max_new_tokens},
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        **{
            "min_tokens": sampling.min_new_tokens,
            "stop": list(sampling.stop),
            "logit_bias": sampling.logit_bias,
        },
    }
    assert reached == fields
    assert turn.requested.sampling == sampling.as_json()


def test_the_newer_name_of_the_limit_counts(proxy: InProcess) -> None:
    """max_completion_tokens before max_tokens; without either a default that fits."""
    _ask(proxy, max_tokens=5, max_completion_tokens=7)
    assert proxy.engine.samplings[-1].max_new_tokens == 7
    _ask(proxy)
    assert proxy.engine.samplings[-1].max_new_tokens == 1024


def test_siblings_have_seeds_of_their_own(proxy: InProcess) -> None:
    """A given seed and the next ones; else any, all different; one request id."""
    _ask(proxy, n=3, seed=5)
    assert sorted(s.seed for s in proxy.engine.samplings[-3:]) == [5, 6, 7]
    _ask(proxy, n=3)
    assert len({s.seed for s in proxy.engine.samplings[-3:]}) == 3


@pytest.mark.parametrize(
    ("shape", "constraint"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_schema": {"type": "object"}}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            {"json_schema": {"type": "array"}},
        ),
    ],
)
def test_json_response_formats_constrain_sampling(proxy: InProcess, shape: Any, constraint: Any) -> None:
    """JSON response formats become a constraint on sampling; others do not."""
    _ask(proxy, response_format=shape)
    assert proxy.engine.samplings[-1].constraint == constraint


@pytest.mark.parametrize(
    "shape", [{"type": "odd"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}}]
)
def test_a_format_that_is_none_is_a_400(proxy: InProcess, shape: Any) -> None:
    """It would make another request than the one that was meant."""
    reply = proxy.ask(f"/t/format{CHAT}", asked("chat", response_format=shape))
    assert (reply.status, reply.json["error"]["code"]) == (400, "bad_response_format")


NOT_HONOURED = [
    ({"top_k": 5}, "top_k"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"best_of": 4}, "best_of"),
    ({"made_up": 0}, "made_up"),
    ({"tools": [{"type": "web_search"}]}, "tools.web_search"),
]


@pytest.mark.parametrize(("fields", "listed"), NOT_HONOURED)
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_listed_in_a_header(
    proxy: InProcess, fields: Any, listed: str, stream: bool
) -> None:
    """In a header of the reply, whole or streamed, and in the log."""
    reply, turn = _ask(proxy, stream=stream, **fields)
    assert reply.headers["x-rollbook-not-honoured"] == listed
    assert turn.requested.honoured == {listed: False}
    assert turn.requested.request == {"stream": stream} | fields


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.1}, {"seed": 4}, {"stop": "x"}, {"logprobs": True}, {"n": 2}, {"user": "u"}),
        *({"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"top_k": None}),
        *({"stream_options": {"include_usage": True}}, {"store": True}, {"metadata": {"a": "b"}}),
    ],
)
def test_honoured_fields_are_not_listed_in_a_header(proxy: InProcess, fields: Any) -> None:
    """No header where all was done that was asked."""
    reply, turn = _ask(proxy, **fields)
    assert "x-rollbook-not-honoured" not in reply.headers
    assert turn.requested.honoured == {}


def test_calls_are_read_only_where_tools_were_offered(proxy: InProcess, tools: list[dict[str, Any]]) -> None:
    """Without tools, or with tool_choice none, the same text is content."""
    called, _ = _ask(proxy, f"so: {CALL}", tools=tools)
    choice = called.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so:"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"a": 1}'}
    for fields in ({}, {"tools": tools, "tool_choice": "none"}):
        plain, _ = _ask(proxy, f"so: {CALL}", **fields)
        choice = plain.json["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", f"so: {CALL}")
        assert "tool_calls" not in choice["message"]


def test_logprobs_are_of_the_sampled_ids(proxy: InProcess) -> None:
    """Each id with its text, its bytes where they are whole characters, and the logprob in the log."""
    reply, turn = _ask(proxy, "a🎉", logprobs=True)
    entries = reply.json["choices"][0]["logprobs"]["content"]
    done = turn.completed
    assert [e["token_id"] for e in entries] == done.completion_ids.tolist()
    assert [e["logprob"] for e in entries] == pytest.approx(done.logprobs.tolist())
    assert entries[0] | {"logprob": 0} == {
        "token": "a",
        "logprob": 0,
        "bytes": [97],
        "top_logprobs": [],
        "token_id": done.completion_ids[0],
    }
    assert entries[1]["bytes"] is None


def test_an_engine_without_logprobs_gives_null(proxy: InProcess) -> None:
    """Where the engine gives no logprobs, `logprobs` is null, not zeros."""
    reply, _ = _ask(proxy, logprobs=False)
    assert reply.json["choices"][0]["logprobs"] is None


def test_the_version_is_in_the_headers_where_it_is_known(proxy: InProcess) -> None:
    """Where it is known before the headers go out."""
    whole, turn = _ask(proxy)
    assert whole.headers["x-rollbook-policy-version"] == str(turn.completed.policy_version) == "5"
    streamed, _ = _ask(proxy, stream=True)
    assert "x-rollbook-policy-version" not in streamed.headers


def test_a_cut_off_reply_says_length(proxy: InProcess) -> None:
    """And keeps what there is, unclosed reasoning included."""
    reply, turn = _ask(proxy, Play("<think>well", "length", ends=False))
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("well", "")
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert turn.completed.flags == ["unclosed_reasoning"]


# Images -----------------------------------------------------------------------------------------------

PIXELS = base64.b64encode(bytes(range(256)) * 60).decode()
URL = f"data:image/png;base64,{PIXELS}"


@pytest.fixture(scope="module")
def seeing(played: Callable[..., InProcess]) -> InProcess:
    """A proxy over a model that takes images."""
    proxy = played("a square", template="sees")
    proxy.engine.takes_images = True
    return proxy


def _with_image(kind: str) -> Any:
    chat = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}
    responses = {"type": "input_image", "image_url": URL}
    part = {"chat": chat, "messages": anthropic, "responses": responses}[kind]
    text = {"type": "input_text" if kind == "responses" else "text", "text": "see"}
    message = {"role": "user", "content": [text, part]}
    return asked(kind) | {"input" if kind == "responses" else "messages": [message]}


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_an_image_is_passed_on(seeing: InProcess, kind: str) -> None:
    """To an engine that takes it, as a data URL, from every API's own form."""
    reply = seeing.ask(f"/t/image-{kind}{PATHS[kind]}", _with_image(kind))
    assert reply.status == 200, reply.data
    prompt = seeing.engine.prompts[-1]
    assert prompt.images == (URL,)
    assert "<image>" in seeing.engine.tokenizer.decode(prompt.ids, special=True)
    assert PIXELS not in seeing.engine.tokenizer.decode(prompt.ids, special=True)


def test_an_image_is_stored_once(seeing: InProcess) -> None:
    """By its digest, however many turns and trajectories show it; requests come back whole."""
    before = _bodies(seeing)
    user = {"role": "user", "content": "and now?"}
    for name in ("twice", "thrice"):
        body = _with_image("chat")
        first = seeing.ask(f"/t/{name}{CHAT}", body)
        message = first.json["choices"][0]["message"]
        assert seeing.ask(f"/t/{name}{CHAT}", {"messages": [*body["messages"], message, user]}).status == 200
        assert seeing.engine.prompts[-1].images == (URL,)
    new = [b for b in _bodies(seeing) if b not in before]
    assert [b.body for b in new] == ([] if URL in [b.body for b in before] else [URL])
    for name in ("twice", "thrice"):
        trajectory = next(t for t in fold(seeing.store.events()).values() if t.opened.name == name)
        parent, child = trajectory.turns.values()
        assert trajectory.messages(parent) == _with_image("chat")["messages"]
        assert trajectory.messages(child)[0] == _with_image("chat")["messages"][0]
        assert child.requested.parent_turn_id == parent.turn_id


def _bodies(proxy: Any) -> list[BodyStored]:
    proxy.settled()
    return [e.record for e in proxy.store.events() if isinstance(e.record, BodyStored)]


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_an_engine_without_vision_refuses_images(proxy: InProcess, kind: str) -> None:
    """An image is a 400 with a code of its own, and nothing is recorded."""
    reply = proxy.ask(f"/t/blind-{kind}{PATHS[kind]}", _with_image(kind))
    assert (reply.status, reply.json["error"]["code"]) == (400, "images_not_served")
    assert f"blind-{kind}" not in proxy.trajectories()
