"""A request that comes again: joined, replayed, or a new sample, also after the proxy was killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.fakes.clients import streamed
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.routes import calls
from rollbook.store.errors import EngineError, RequestError
from rollbook.store.fold.trajectory import fold

AGAIN = {"x-stainless-retry-count": "1"}
CHAT = PATHS["chat"]


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that numbers what it says, at once."""
    numbers = itertools.count()
    proxy.engine.answer, proxy.engine.pace = lambda *_: f"sample {next(numbers)}", None
    proxy.engine.aborted.clear()


def _turns(proxy: Any, name: str) -> list[Any]:
    return list(proxy.trajectories()[name].turns.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_gets_the_stored_reply_byte_for_byte(proxy: InProcess, kind: str) -> None:
    """Nothing is sampled again and nothing recorded again; whichever way it says that it is one."""
    name, body = f"replay-{kind}", asked(kind, unknown=[1.5, None])
    first = proxy.ask(f"/t/{name}{PATHS[kind]}", body)
    asked_before, head = len(proxy.engine.prompts), proxy.store.head()
    for count in ("1", "2", "99999"):
        again = proxy.ask(f"/t/{name}{PATHS[kind]}", body, headers={"x-stainless-retry-count": count})
        assert (again.status, again.data) == (200, first.data)
        assert again.headers == first.headers
    assert len(proxy.engine.prompts) == asked_before
    proxy.settled()
    kinds = [e.kind for e in proxy.store.events(start=head)]
    assert kinds in ([], ["turn.delivered"])
    (turn,) = _turns(proxy, name)
    assert turn.delivered == "sent"


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_retry_says_the_same(proxy: InProcess, kind: str) -> None:
    """Its chunks may be cut otherwise, and add up to the same reply of the same turn."""
    name, body = f"restream-{kind}", asked(kind, stream=True)
    first, second = (proxy.ask(f"/t/{name}{PATHS[kind]}", body, headers=h) for h in ({}, AGAIN))
    assert streamed.together(kind, first.data) == streamed.together(kind, second.data)
    assert len(_turns(proxy, name)) == 1


def test_n_choices_are_replayed_together(proxy: InProcess) -> None:
    """All siblings, in their order."""
    body = asked("chat", n=3, logprobs=True)
    first, second = (proxy.ask(f"/t/three{CHAT}", body, headers=h) for h in ({}, AGAIN))
    assert first.data == second.data
    assert [c["message"]["content"] for c in second.json["choices"]] == ["sample 0", "sample 1", "sample 2"]
    assert len({t.requested.request_id for t in _turns(proxy, "three")}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_joins_the_request_that_runs(proxy: InProcess, kind: str, stream: bool) -> None:
    """One generation, two clients, equal replies; the first may leave without ending it."""
    engine, name = proxy.engine, f"join-{kind}-{stream}"
    engine.pace = asyncio.Semaphore(0)
    path, body = f"/t/{name}{PATHS[kind]}", asked(kind, stream=stream)

    async def scenario() -> Any:
        first = proxy.exchange(path, body)
        await first.until(lambda: engine.prompts)
        engine.pace.release()
        if stream:
            await first.until(lambda: first.parts)
        second = proxy.exchange(path, body, headers=AGAIN)
        third = proxy.exchange(path, body, headers=AGAIN)
        (call,) = proxy.recorder.known(name).calls
        await second.until(lambda: len(call._listeners) == 3)
        first.leave()
        await first.end()
        for _ in range(50):
            engine.pace.release()
        return first, await second.end(), await third.end()

    engine.prompts.clear()
    first, second, third = proxy.run(scenario())
    assert len(engine.prompts) == 1
    assert engine.aborted == []
    assert not first.ended
    if stream:
        whole = [streamed.together(kind, reply.data) for reply in (second, third)]
    else:
        whole = [second.json, third.json]
        assert second.data == third.data
    assert whole[0] == whole[1]
    assert streamed.text_in(kind, whole[0]) == "sample 0"
    (turn,) = _turns(proxy, name)
    assert (turn.delivered, turn.completed.finish_reason) == ("sent", "stop")


def test_a_retry_of_what_is_being_aborted_is_a_new_attempt(proxy: InProcess) -> None:
    """Its only client gave up, so the engine is ending it: the retry must not get half a reply."""
    engine = proxy.engine
    pace = engine.pace = asyncio.Semaphore(0)
    path, body = f"/t/given-up{CHAT}", asked("chat")
    ending = asyncio.Event()

    async def slow_abort(request_id: str) -> None:
        await ending.wait()
        await type(engine).abort(engine, request_id)

    async def scenario() -> Any:
        engine.prompts.clear()
        first = proxy.exchange(path, body)
        await first.until(lambda: engine.prompts)
        engine.pace.release()
        await asyncio.sleep(0.01)
        engine.abort = slow_abort
        first.leave()
        await asyncio.sleep(0.02)
        second = proxy.exchange(path, body, headers=AGAIN)
        await second.until(lambda: len(engine.prompts) == 2)
        ending.set()
        await first.end()
        for _ in range(50):
            pace.release()
        return await second.end()

    try:
        second = proxy.run(scenario())
    finally:
        del engine.abort
    assert second.json["choices"][0]["message"]["content"] == "sample 1"
    aborted, retried = _turns(proxy, "given-up")
    assert (aborted.completed.finish_reason, aborted.delivered) == ("abort", None)
    assert (retried.completed.finish_reason, retried.delivered) == ("stop", "sent")
    assert [t.requested.wire.get("retry") for t in (aborted, retried)] == [None, 1]


def test_a_retry_of_what_was_aborted_is_a_new_attempt(proxy: InProcess) -> None:
    """Half a reply that nobody waited for is kept, and never given for the whole."""
    engine = proxy.engine
    engine.pace = asyncio.Semaphore(2)

    async def scenario() -> None:
        engine.prompts.clear()
        first = proxy.exchange(f"/t/aborted{CHAT}", asked("chat"))
        await first.until(lambda: engine.prompts)
        await asyncio.sleep(0.01)
        first.leave()
        await first.end()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    engine.pace = None
    reply = proxy.ask(f"/t/aborted{CHAT}", asked("chat"), headers=AGAIN)
    assert reply.json["choices"][0]["message"]["content"] == "sample 1"
    aborted, retried = _turns(proxy, "aborted")
    assert (aborted.completed.finish_reason, retried.completed.finish_reason) == ("abort", "stop")


def test_a_reply_that_nobody_took_is_taken_by_a_retry(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot abort went on to the end: that reply is given, and delivered only then."""
    engine = proxy.engine
    engine.pace = asyncio.Semaphore(0)

    async def nothing(request_id: str) -> None:
        return

    async def scenario() -> None:
        engine.prompts.clear()
        first = proxy.exchange(f"/t/taken{CHAT}", asked("chat"))
        await first.until(lambda: engine.prompts)
        first.leave()
        await first.end()
        for _ in range(50):
            engine.pace.release()
        await proxy.turn_runner.drained()

    class Gone(calls._Client):
        """One that went in the very moment in which the reply was there."""

        def __init__(self, *ends: Any) -> None:
            super().__init__(*ends)
            self.gone = True

    with monkeypatch.context() as patch:
        patch.setattr(engine, "abort", nothing)
        proxy.run(scenario())
        patch.setattr(calls, "_Client", Gone)
        proxy.ask(f"/t/taken{CHAT}", asked("chat"), headers=AGAIN)
    (turn,) = _turns(proxy, "taken")
    assert (turn.completed.finish_reason, turn.delivered) == ("stop", None)
    reply = proxy.ask(f"/t/taken{CHAT}", asked("chat"), headers=AGAIN)
    assert reply.json["choices"][0]["message"]["content"] == "sample 0"
    (turn,) = _turns(proxy, "taken")
    assert turn.delivered == "sent"


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "no"}])
def test_an_equal_body_without_the_mark_is_a_new_sample(proxy: InProcess, headers: Any) -> None:
    """A resample is what the agent wants: two turns with one parent, one prompt and different seeds."""
    name = f"resample-{headers.get('x-stainless-retry-count')}"
    reply, other = (proxy.ask(f"/t/{name}{CHAT}", asked("chat"), headers=headers) for _ in range(2))
    assert [r.json["choices"][0]["message"]["content"] for r in (reply, other)] == ["sample 0", "sample 1"]
    first, second = _turns(proxy, name)
    assert first.requested.parent_turn_id == second.requested.parent_turn_id
    assert first.requested.request_id != second.requested.request_id
    assert first.requested.wire["digest"] == second.requested.wire["digest"]
    assert first.requested.sampling["seed"] != second.requested.sampling["seed"]


def test_equal_bodies_at_once_are_siblings(proxy: InProcess) -> None:
    """Without the mark nothing is joined, also while the other one runs."""
    engine, path = proxy.engine, f"/t/at-once{CHAT}"
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> Any:
        engine.prompts.clear()
        both = [proxy.exchange(path, asked("chat")) for _ in range(2)]
        await both[0].until(lambda: len(engine.prompts) == 2)
        for _ in range(99):
            engine.pace.release()
        return [await exchange.end() for exchange in both]

    replies = proxy.run(scenario())
    contents = {r.json["choices"][0]["message"]["content"] for r in replies}
    assert contents == {"sample 0", "sample 1"}
    assert [t.delivered for t in _turns(proxy, "at-once")] == ["sent", "sent"]


def test_a_retry_of_another_body_endpoint_or_trajectory_is_none(proxy: InProcess) -> None:
    """What is equal is the whole request: each of these is answered anew."""
    proxy.ask(f"/t/mine{CHAT}", asked("chat"))
    raw = orjson.dumps(asked("chat"))
    for path, body in (
        (f"/t/mine{CHAT}", asked("chat", user="x")),
        (f"/t/mine{CHAT}", raw + b" "),
        (f"/t/theirs{CHAT}", asked("chat")),
        (f"/t/mine{PATHS['responses']}", asked("responses")),
    ):
        proxy.ask(path, body, headers=AGAIN)
    assert len(_turns(proxy, "mine")) == 4
    assert len(_turns(proxy, "theirs")) == 1


def test_a_retry_of_what_failed_is_a_new_attempt(proxy: InProcess) -> None:
    """A failure is not replayed."""
    answers: Any = iter([EngineError("busy"), "fine"])
    proxy.engine.answer = lambda *_: next(answers)
    assert proxy.ask(f"/t/fails{CHAT}", asked("chat")).status == 502
    reply = proxy.ask(f"/t/fails{CHAT}", asked("chat"), headers=AGAIN)
    assert reply.json["choices"][0]["message"]["content"] == "fine"
    bad, good = _turns(proxy, "fails")
    assert (bad.failed is not None, good.requested.wire["retry"]) == (True, 1)


def _calls(proxy: Any, name: str) -> list[Any]:
    """The requests of a trajectory that run."""
    try:
        return list(proxy.recorder.known(name).calls)
    except RequestError:
        return []


def test_both_who_wait_are_told_of_a_failure(proxy: InProcess) -> None:
    """A joined retry fails with the request it joined."""
    engine, path = proxy.engine, f"/t/both-fail{CHAT}"
    engine.answer = lambda *_: EngineError("gone")
    engine.doors.clear()

    async def scenario() -> Any:
        first = proxy.exchange(path, asked("chat"))
        await first.until(lambda: _calls(proxy, "both-fail"))
        (call,) = _calls(proxy, "both-fail")
        second = proxy.exchange(path, asked("chat"), headers=AGAIN)
        await second.until(lambda: len(call._listeners) == 2)
        engine.doors.set()
        return await first.end(), await second.end()

    replies = proxy.run(scenario())
    assert [r.status for r in replies] == [502, 502]
    assert len(_turns(proxy, "both-fail")) == 1


def test_the_newest_64_requests_are_remembered(proxy: InProcess) -> None:
    """A retry of an older one is a new attempt, and memory stays small."""
    for number in range(66):
        proxy.ask(f"/t/many{CHAT}", asked("chat", text=str(number)))
    proxy.ask(f"/t/many{CHAT}", asked("chat", text="65"), headers=AGAIN)
    assert len(_turns(proxy, "many")) == 66
    proxy.ask(f"/t/many{CHAT}", asked("chat", text="0"), headers=AGAIN)
    assert len(_turns(proxy, "many")) == 67


# Killed ---------------------------------------------------------------------------------------------


@pytest.mark.crashes
def test_replies_are_replayed_after_a_kill(
    serve: Callable[..., Served], text_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """kill -9 and a new process: a retry still gets what was stored, byte for byte, from every endpoint."""
    counting = tmp_path / "counting.py"
    counting.write_text(
        "import secrets\ndef answer(messages, tools):\n    return 'sample ' + secrets.token_hex(8)\n"
    )
    served = serve(
        "--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{counting}:answer"
    )
    kinds = ("chat", "responses", "messages")
    bodies = {kind: asked(kind, user="é", metadata={"a": [1.0, 2]}) for kind in kinds}
    bodies |= {"three": asked("chat", n=3), "stream": asked("chat", stream=True)}
    paths = {key: PATHS.get(key, CHAT) for key in bodies}

    def ask(key: str, headers: Any = None) -> httpx.Response:
        return httpx.post(f"{served.url}/t/{key}{paths[key]}", json=bodies[key], headers=headers, timeout=30)

    first = {key: ask(key) for key in bodies}
    assert {r.status_code for r in first.values()} == {200}
    served.kill()
    served.start()
    for key, reply in first.items():
        again = ask(key, AGAIN)
        assert again.status_code == 200
        if key == "stream":
            assert streamed.chat(again.content) == streamed.chat(reply.content)
        else:
            assert again.content == reply.content
        assert again.headers["x-rollbook-turn-id"] == reply.headers["x-rollbook-turn-id"]
        other = ask(key)
        assert streamed.TURN.findall(other.text)[0] not in reply.text
    trajectories = {t.opened.name: t for t in fold(store.open(served.path).events()).values()}
    assert {name: len(t.turns) for name, t in trajectories.items()} == {
        "chat": 2,
        "responses": 2,
        "messages": 2,
        "three": 6,
        "stream": 2,
    }
    served.stop()
