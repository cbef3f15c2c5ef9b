"""Streams: they say exactly what the whole reply says, and end only once the turn is durable."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clients import streamed
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

from rollbook import store
from rollbook.ingest.routes import calls
from rollbook.ingest.turns.in_flight import InFlightCall
from rollbook.store.errors import EngineError
from rollbook.store.fold.trajectory import fold

NAMES = itertools.count()
CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
PIECES = st.sampled_from(
    [
        *("Hello", " ", "\n\n", "é", "🎉", "👩‍👩‍👧", "STOP", "ST", "OP", "\u3000", "{", '"'),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "calc"}'),
        *(CALL[:30], CALL.replace("calc", "other"), CALL.replace("}}", "}")),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=9).map("".join)
PLAYS = st.builds(
    # An engine samples one token at least.
    lambda text, finish, ends: Play(text, finish, ends or not text),
    TEXTS,
    st.sampled_from(["stop", "length"]),
    st.booleans(),
)
STOPS = st.sampled_from([(), ("STOP",), ("OP", "STOP"), ("l",), ("🎉",), ("</think>",)])


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that says what it has at once."""
    engine = proxy.engine
    engine.pace, engine.answer = None, lambda *_: "Hello"
    engine.sizes = lambda: itertools.repeat(1)
    engine.doors.set()


def _fields(kind: str, stops: tuple[str, ...], tools: Any, count: int) -> dict[str, Any]:
    """The request's fields under the names that its API has for them."""
    fields: dict[str, Any] = {}
    if kind == "messages":
        fields |= {"stop_sequences": list(stops)} if stops else {}
        bare = [{"name": t["function"]["name"], "input_schema": {"type": "object"}} for t in tools]
        return fields | ({"tools": bare} if tools else {})
    if kind == "responses":
        return fields | ({"tools": [{"type": "function"} | t["function"] for t in tools]} if tools else {})
    fields |= {"n": count, "logprobs": True} | ({"stop": list(stops)} if stops else {})
    return fields | ({"tools": tools} if tools and kind == "chat" else {})


def _same(kind: str, whole: Any, joined: Any) -> None:
    """A stream leaves out fields that are empty, and says no texts' places."""
    if kind == "chat":
        for choice in (*whole["choices"], *joined["choices"]):
            message = choice["message"]
            message.pop("refusal", None)
            for key in ("content", "reasoning_content"):
                message[key] = message.get(key) or ""
    if kind == "completions":
        for choice in whole["choices"]:
            if choice["logprobs"]:
                choice["logprobs"] = {k: choice["logprobs"][k] for k in ("tokens", "token_logprobs")}
    assert streamed.numbered(joined) == streamed.numbered(whole)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_stream_says_what_the_whole_reply_says(
    proxy: InProcess, tools: list[dict[str, Any]], kind: str, data: Any
) -> None:
    """Whatever is sampled and however it is cut: texts, reasoning, calls, logprobs, finish and usage."""
    count = data.draw(st.integers(1, 3), "choices") if kind in ("chat", "completions") else 1
    plays = data.draw(st.lists(PLAYS, min_size=count, max_size=count), "plays")
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9), "sizes")
    stops, usage = data.draw(STOPS), data.draw(st.booleans())
    offered = tools if data.draw(st.booleans(), "tools") else []
    fields = _fields(kind, stops, offered, count)
    engine = proxy.engine
    replies = []
    for stream in (False, True):
        order = iter(plays)
        engine.answer, engine.sizes = lambda *_, order=order: next(order), lambda: itertools.cycle(sizes)
        options = {"stream_options": {"include_usage": usage}} if kind in ("chat", "completions") else {}
        body = asked(kind, **fields) | ({"stream": True, **options} if stream else {})
        replies.append(proxy.ask(f"/t/s{next(NAMES)}{PATHS[kind]}", body))
    whole, pieces = replies
    assert (whole.status, pieces.status) == (200, 200), whole.data
    joined = streamed.together(kind, pieces.data, usage)
    expected = whole.json
    if kind in ("chat", "completions") and not usage:
        expected["usage"] = None
    if kind == "responses":
        for reply in (expected, joined):
            reply.pop("model")
    _same(kind, expected, joined)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_server_sent_events(proxy: InProcess, kind: str) -> None:
    """Its headers keep caches and buffers away; it names its trajectory and its turn; whole pieces only."""
    proxy.engine.answer = lambda *_: "🎉 four"
    reply = proxy.ask(f"/t/framed-{kind}{PATHS[kind]}", asked(kind, stream=True))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    trajectory = proxy.trajectories()[f"framed-{kind}"]
    (turn,) = trajectory.turns.values()
    assert reply.headers["x-rollbook-turn-id"] == turn.turn_id
    assert reply.headers["x-rollbook-trajectory-id"] == trajectory.opened.trajectory_id
    for part in reply.parts:
        assert part.endswith(b"\n\n")
        part.decode()
    assert b"\\u" not in reply.data
    assert streamed.text_of(kind, reply.data) == "🎉 four"


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_as_it_is_sampled(proxy: InProcess, kind: str) -> None:
    """Each token that completes a character goes out before the next one is sampled."""
    engine = proxy.engine
    engine.answer, engine.pace = lambda *_: "Hé🎉!", asyncio.Semaphore(0)
    body = asked(kind, stream=True)

    async def scenario() -> list[str]:
        reply = proxy.exchange(f"/t/paced-{kind}{PATHS[kind]}", body)
        await reply.until(lambda: engine.prompts)
        texts = []
        total = len(engine.tokenizer.encode("Hé🎉!")) + 1
        for _ in range(total - 1):
            engine.pace.release()
            await asyncio.sleep(0.05)  # on a busy machine too
            texts.append(streamed.text_of(kind, reply.data) if reply.parts else "")
        assert not reply.ended
        engine.pace.release()
        await reply.end()
        assert reply.ended
        return texts

    texts = proxy.run(scenario())
    assert texts == sorted(texts)
    assert [s for s, _ in itertools.groupby(texts)] in (
        ["H", "Hé", "Hé🎉", "Hé🎉!"],
        ["", "H", "Hé", "Hé🎉", "Hé🎉!"],
    )


@pytest.mark.parametrize("usage", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_usage_comes_only_if_it_is_asked_for(proxy: InProcess, kind: str, usage: Any) -> None:
    """As the last chunk before the terminator, with no choices; else nowhere."""
    options = {} if usage is None else {"stream_options": usage}
    reply = proxy.ask(f"/t/u{next(NAMES)}{PATHS[kind]}", asked(kind, stream=True, **options))
    chunks = streamed.unnamed(reply.data)
    wanted = bool(usage and usage.get("include_usage"))
    assert (chunks[-1]["choices"] == []) == wanted
    if wanted:
        asked_tokens = len(proxy.engine.prompts[-1].ids)
        sampled = len(proxy.engine.made[-1].completion_ids)
        assert chunks[-1]["usage"] == {
            "prompt_tokens": asked_tokens,
            "completion_tokens": sampled,
            "total_tokens": asked_tokens + sampled,
        }
    assert sum(bool(c.get("usage")) for c in chunks) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_freed_once_it_is_answered(proxy: InProcess, stream: bool) -> None:
    """Nothing of it is left in a circle, which would stay in memory until a collection."""
    gc.collect()
    gc.disable()
    try:
        assert proxy.ask(f"/t/freed-{stream}{PATHS['chat']}", asked("chat", stream=stream)).status == 200
        proxy.settled()
        assert not [thing for thing in gc.get_objects() if type(thing) is InFlightCall]
    finally:
        gc.enable()


# Durable before the end ------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk takes nothing until the event is set."""
    gate, real = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        gate.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    yield gate
    gate.set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_waits_for_the_disk(proxy: InProcess, slow_disk: threading.Event, kind: str) -> None:
    """All the text is out; finish, usage and terminator come when the turn is durable and not before."""
    name = f"slow-{kind}"

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/{name}{PATHS[kind]}", asked(kind, stream=True))
        await reply.until(lambda: reply.parts and streamed.text_of(kind, reply.data) == "Hello")
        await asyncio.sleep(0.15)
        assert not reply.ended
        assert not any(end in reply.data for end in streamed.TERMINATORS[kind])
        assert name not in {t.opened.name for t in fold(proxy.store.events()).values()}
        slow_disk.set()
        await reply.end()
        assert all(end in reply.data for end in streamed.TERMINATORS[kind])
        (turn,) = next(t for t in fold(proxy.store.events()).values() if t.opened.name == name).turns.values()
        assert turn.completed is not None

    proxy.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_cannot_be_recorded_has_no_end(
    played: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch, kind: str, stream: bool
) -> None:
    """The client is told of the error in its API's form, sees no terminator, and the log holds no turn."""
    proxy = played()

    def fdatasync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        reply = proxy.ask(f"/t/full{PATHS[kind]}", asked(kind, stream=stream))
    if not stream:
        assert reply.status == 503
        assert reply.headers["x-should-retry"] == "true"
        assert reply.json["error"]["code"] == "store_failed"
    else:
        assert (reply.status, reply.ended, reply.error) == (200, True, None)
        assert streamed.text_of(kind, reply.data) == "Hello"
        assert not any(end in reply.data for end in streamed.TERMINATORS[kind])
        name, error = streamed.events(reply.data)[-1]
        assert name == {"responses": "error", "messages": "error"}.get(kind)
        assert (error if kind == "responses" else error["error"])["code"] == "store_failed"
    assert fold(store.open(proxy.store.path).events()) == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_fails_before_the_first_token(proxy: Any, kind: str, stream: bool) -> None:
    """Nothing is out yet, so the status says it: 502 in the API's own form, and the turn has failed."""
    proxy.engine.answer = lambda *_: EngineError("no GPU left")
    name = f"fails-{kind}-{stream}"
    reply = proxy.ask(f"/t/{name}{PATHS[kind]}", asked(kind, stream=stream))
    assert reply.status == 502
    error = reply.json
    if kind == "messages":
        assert error == {
            "type": "error",
            "error": {"type": "api_error", "message": "no GPU left", "code": "engine_failed"},
        }
    else:
        assert error["error"] == {
            "message": "no GPU left",
            "type": "server_error",
            "code": "engine_failed",
            "param": None,
        }
    (turn,) = proxy.trajectories()[name].turns.values()
    assert turn.completed is None
    assert turn.failed.error == "EngineError('no GPU left')"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_our_own_is_told_in_the_apis_form(proxy: Any, kind: str) -> None:
    """An exception that nobody foresaw is a 500 with a body that clients can read, and a failed turn."""
    proxy.engine.answer = lambda *_: ZeroDivisionError("oops")
    name = f"bug-{kind}"
    reply = proxy.ask(f"/t/{name}{PATHS[kind]}", asked(kind))
    assert reply.status == 500
    assert reply.json["error"]["code"] == "internal_error"
    assert reply.json["error"]["type"] == ("api_error" if kind == "messages" else "server_error")
    assert "oops" not in reply.data.decode()
    (turn,) = proxy.trajectories()[name].turns.values()
    assert "ZeroDivisionError" in turn.failed.error


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_siblings_all_come_to_an_end_when_one_fails(proxy: Any, kind: str) -> None:
    """With n = 2 and one failure the client gets an error; the other completion is kept, undelivered."""
    answers: Iterator[Any] = iter(["Hello", EngineError("gone")])
    proxy.engine.answer = lambda *_: next(answers)
    reply = proxy.ask(f"/t/half-{kind}{PATHS[kind]}", asked(kind, n=2))
    assert reply.status == 502
    good, bad = proxy.trajectories()[f"half-{kind}"].turns.values()
    assert (good.completed.reply["content"], good.delivered, bad.completed) == ("Hello", None, None)
    assert good.requested.request_id == bad.requested.request_id
    assert [t.requested.wire.get("choice", 0) for t in (good, bad)] == [0, 1]


# While nothing comes ---------------------------------------------------------------------------------


@pytest.fixture
def anxious(proxy: InProcess, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """A proxy that keeps connections alive every few hundredths of a second."""
    for silence in ("STREAM_SILENCE_S", "WHOLE_SILENCE_S"):
        monkeypatch.setattr(calls, silence, 0.03)
    return proxy


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_kept_alive(anxious: InProcess, kind: str) -> None:
    """Comments, or Anthropic's pings, before the first token and between; the reply is as without them."""
    mark = b"event: ping" if kind == "messages" else b": keep-alive\n\n"
    engine = anxious.engine
    engine.answer, engine.pace = lambda *_: "Hello", asyncio.Semaphore(0)

    async def scenario() -> Any:
        reply = anxious.exchange(f"/t/alive-{kind}{PATHS[kind]}", asked(kind, stream=True))
        await reply.until(lambda: mark in reply.data)
        early = reply.data
        engine.pace.release()
        await reply.until(lambda: mark in reply.data[len(early) :])
        for _ in range(50):
            engine.pace.release()
        await reply.end()
        return early, reply

    early, reply = anxious.run(scenario())
    assert b"Hell" not in early
    whole = streamed.together(kind, reply.data)
    assert streamed.text_in(kind, whole) == "Hello"


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_reply_is_kept_alive_by_spaces(anxious: InProcess, kind: str) -> None:
    """They come before the JSON, which is as it would be."""
    engine = anxious.engine
    engine.answer, engine.pace = lambda *_: "Hello", asyncio.Semaphore(0)

    async def scenario() -> Any:
        reply = anxious.exchange(f"/t/spaces-{kind}{PATHS[kind]}", asked(kind))
        await reply.until(lambda: len(reply.parts) > 2)
        early = reply.data
        for _ in range(50):
            engine.pace.release()
        await reply.end()
        return early, reply

    early, reply = anxious.run(scenario())
    assert early.strip(b" ") == b""
    assert "content-length" not in reply.headers
    assert reply.headers["content-type"] == "application/json"
    assert streamed.text_in(kind, orjson.loads(reply.data)) == "Hello"
    (turn,) = anxious.trajectories()[f"spaces-{kind}"].turns.values()
    assert turn.delivered == "sent"


def test_a_failure_after_the_spaces_ends_the_connection(anxious: InProcess) -> None:
    """No status can tell any more, and a reply that looks whole must not: so the body has no end."""
    engine = anxious.engine

    engine.doors.clear()
    engine.answer = lambda *_: EngineError("gone")

    async def scenario() -> Any:
        reply = anxious.exchange("/t/spaces-fail/v1/chat/completions", asked("chat"))
        await reply.until(lambda: reply.parts)
        engine.doors.set()
        return await reply.end()

    reply = anxious.run(scenario())
    engine.doors.set()
    assert reply.data.strip(b" ") == b""
    assert not reply.ended
    assert reply.error is not None
