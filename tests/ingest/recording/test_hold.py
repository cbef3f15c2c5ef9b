"""While weights are replaced: requests wait, and those that wait too long are told when to come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import KINDS, PATHS, asked, text_in, together
from tests.fakes.proxies.in_process import InProcess

from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.store.errors import EngineHeldError


@pytest.fixture
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy that holds requests for 0.15 s, with an engine whose doors are closed."""
    proxy = played()
    proxy.turn_runner.hold_s = 0.15
    proxy.engine.doors.clear()
    return proxy


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_too_long_is_sent_away_for_a_while(proxy: Any, kind: str) -> None:
    """503, streamed or not; no more than 50 s, and worth trying again; the turn has failed in the log."""

    async def scenario() -> Any:
        begun = time.monotonic()
        both = [
            proxy.exchange(f"/t/held-{stream}{PATHS[kind]}", asked(kind, stream=stream)) for stream in (0, 1)
        ]
        return [await exchange.end() for exchange in both], time.monotonic() - begun

    replies, took = proxy.run(scenario())
    assert 0.15 <= took < 20
    for reply in replies:
        assert reply.status == 503
        assert 1 <= int(reply.headers["retry-after"]) <= 50
        assert reply.headers["x-should-retry"] == "true"
        assert reply.json["error"]["code"] == "engine_held"
        assert reply.json["error"]["type"] == ("overloaded_error" if kind == "messages" else "server_error")
    assert proxy.engine.prompts == []
    for trajectory in proxy.trajectories().values():
        (turn,) = trajectory.turns.values()
        assert turn.completed is None
        assert "engine_held" in turn.failed.error or "being replaced" in turn.failed.error


def test_who_waits_not_too_long_is_answered(proxy: Any) -> None:
    """All that came in meanwhile, by the weights that are there then."""

    async def scenario() -> Any:
        waiting = [
            proxy.exchange(f"/t/wait-{kind}-{stream}{PATHS[kind]}", asked(kind, stream=stream))
            for kind in KINDS
            for stream in (False, True)
        ]
        await asyncio.sleep(0.05)
        assert not any(one.status for one in waiting)
        assert proxy.engine.prompts == []
        proxy.engine.version = 6
        proxy.engine.doors.set()
        return [await one.end() for one in waiting]

    replies = proxy.run(scenario())
    for kind, whole, pieces in zip(KINDS, replies[::2], replies[1::2], strict=True):
        assert text_in(kind, whole.json) == text_in(kind, together(kind, pieces.data)) == "Hello"
    turns = [t for one in proxy.trajectories().values() for t in one.turns.values()]
    assert {t.completed.policy_version for t in turns} == {6}
    assert len(turns) == 8


def test_a_retry_after_a_503_is_answered(proxy: Any) -> None:
    """The failed turn stays; the retry is a new one behind the same history."""
    body = asked("chat")
    assert proxy.ask("/t/back/v1/chat/completions", body).status == 503
    proxy.engine.doors.set()
    reply = proxy.ask("/t/back/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    assert reply.status == 200
    failed, retry = proxy.trajectories()["back"].turns.values()
    assert (failed.completed, retry.delivered, retry.requested.wire["retry"]) == (None, "sent", 1)
    live: LiveTrajectory = proxy.recorder.find("back")
    assert (live.running, live.sending) == (0, 0)


def test_who_waits_when_the_proxy_ends(proxy: InProcess) -> None:
    """503 at once, for all who wait and all who come, worth trying again."""
    proxy.turn_runner.hold_s = 110.0

    async def scenario() -> Any:
        waiting = [
            proxy.exchange(f"/t/ends-{kind}-{stream}{PATHS[kind]}", asked(kind, stream=stream))
            for kind in KINDS
            for stream in (False, True)
        ]
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        proxy.app.state.stop()
        late = proxy.exchange(f"/t/late{PATHS['chat']}", asked("chat"))
        return [await exchange.end() for exchange in [*waiting, late]], time.monotonic() - begun

    replies, took = proxy.run(scenario())
    assert took < 5
    for reply in replies:
        assert (reply.status, reply.headers["x-should-retry"]) == (503, "true")
        assert reply.json["error"]["code"] == "proxy_ends"
    assert proxy.engine.prompts == []


def test_what_is_sampled_when_the_proxy_ends(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a while to be answered; then it is cut off, a turn that failed, and its client asks again."""
    monkeypatch.setattr("rollbook.ingest.recording.runner.ANSWERED_S", 0.05)
    proxy.engine.doors.set()
    assert proxy.ask(f"/t/short{PATHS['chat']}", asked("chat")).status == 200
    proxy.engine.pace = asyncio.Semaphore(1)

    async def scenario() -> Any:
        asks = proxy.exchange(f"/t/long{PATHS['chat']}", asked("chat"))
        while not proxy.engine.prompts:
            await asyncio.sleep(0.001)
        proxy.app.state.stop()
        return await asks.end()

    reply = proxy.run(scenario())
    assert (reply.status, reply.json["error"]["code"]) == (503, "proxy_ends")
    (turn,) = proxy.trajectories()["long"].turns.values()
    assert (turn.completed, "ending" in turn.failed.error) == (None, True)


def test_who_waits_again_when_the_rest_is_cut_off(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that its engine gave back waits for one; what is sampled beside it is cut off."""
    monkeypatch.setattr("rollbook.ingest.recording.runner.ANSWERED_S", 0.05)
    monkeypatch.setattr("rollbook.ingest.recording.runner.SOON_S", 0.3)
    proxy.engine.doors.set()
    proxy.engine.pace = asyncio.Semaphore(1)
    generate, faults = proxy.engine.generate, list[Any]()

    async def gives_back(prompt: Any, *rest: Any) -> Any:
        if prompt.messages[-1]["content"] != "give back":
            return await generate(prompt, *rest)
        while proxy.engine.doors.is_set():
            await asyncio.sleep(0.001)
        raise EngineHeldError("its weights are being replaced")

    monkeypatch.setattr(proxy.engine, "generate", gives_back)

    async def scenario() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        texts = {"back": "give back", "long": "Hello"}
        asks = [proxy.exchange(f"/t/{n}{PATHS['chat']}", asked("chat", text)) for n, text in texts.items()]
        while not proxy.engine.prompts:
            await asyncio.sleep(0.001)
        proxy.app.state.stop()
        proxy.engine.doors.clear()
        async with asyncio.timeout(20):
            return [await ask.end() for ask in asks]

    replies = proxy.run(scenario())
    assert [(reply.status, reply.json["error"]["code"]) for reply in replies] == [(503, "proxy_ends")] * 2
    assert faults == []


def test_who_left_is_not_waited_for(proxy: Any) -> None:
    """A request whose client has gone waits for no engine: its trajectory is free to be finished."""
    proxy.turn_runner.hold_s = 110.0

    async def scenario() -> None:
        asks = proxy.exchange(f"/t/left{PATHS['chat']}", asked("chat"))
        await asyncio.sleep(0.05)
        live: LiveTrajectory = proxy.recorder.find("left")
        assert live.running == 1
        asks.leave()
        async with asyncio.timeout(5):
            while live.running:
                await asyncio.sleep(0.002)

    proxy.run(scenario())
