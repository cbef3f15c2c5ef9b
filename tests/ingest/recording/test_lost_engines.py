"""An engine goes away while it answers: who has seen nothing is answered by another, and the log says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clients.streamed import KINDS, PATHS, TERMINATORS, asked, text_in, text_of, together
from tests.fakes.engines.played import PlayedEngine
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.stories.training import RUN
from tests.fakes.stories.weights import ToldWeights

from rollbook.bench.scripted.job import Answer, Failure, Options
from rollbook.bench.scripted.sglang import ScriptedSGLang
from rollbook.engines import fleet as fleets
from rollbook.engines.fleet import Fleet
from rollbook.engines.sglang.client import SglangEngine
from rollbook.ingest.recording.restore import restored
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.in_flight import InFlightTurn
from rollbook.store.errors import EngineLostError
from rollbook.store.events import Event, SyncFailed, SyncFinished, SyncStarted
from rollbook.store.fold.trajectory import Trajectory
from rollbook.testing.asgi import serving

URLS = ("http://127.0.0.1:3000", "http://127.0.0.1:3001")


class Mortal(PlayedEngine):
    """Plays its answer, until it is killed in the middle of it."""

    def __init__(self, tokenizer: Any, answer: Any) -> None:
        super().__init__(tokenizer, answer)
        self.pace = asyncio.Semaphore(0)
        self.killed = asyncio.Event()
        self.heard = 0

    async def start(self, activated: Any) -> None:
        """Only while it lives."""
        if self.killed.is_set():
            raise EngineLostError("nothing answers")

    async def verify(self) -> None:
        """Only while it lives."""
        await self.start(None)

    async def generate(self, prompt: Any, sampling: Any, on_tokens: Any = lambda ids, logprobs: None) -> Any:
        """Play, or fail when it is killed."""

        def told(ids: Any, logprobs: Any) -> None:
            self.heard += len(ids)
            on_tokens(ids, logprobs)

        answer = asyncio.ensure_future(super().generate(prompt, sampling, told))
        killed = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait({answer, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if answer.done():
            return answer.result()
        answer.cancel()
        raise EngineLostError("the connection was reset")


@pytest.fixture
def two(
    in_process: Any,
    chat: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A proxy over two engines: the first is asked first, the second says something else, at once."""
    monkeypatch.setattr(fleets, "PROBE_S", 0.01)
    engine, other = Mortal(chat("chatml"), "Hello from one"), PlayedEngine(chat("chatml"), "Hi from another")
    proxy = in_process(Fleet(dict(zip(URLS, (engine, other), strict=True))), chat("chatml"))
    proxy.one, proxy.other = engine, other
    return proxy


def only(proxy: Any) -> Trajectory:
    """The trajectory that the log holds."""
    [trajectory] = proxy.trajectories().values()
    return trajectory


def hears(turn: InFlightTurn, proxy: Any) -> None:
    """The turn gets its first tokens."""
    ids = proxy.one.tokenizer.encode("Gone").tolist()
    turn.add(ids, [-1.0] * len(ids))


def check_asked_again(trajectory: Trajectory, text: str) -> None:
    """One turn failed, the other completed: as a turn of its own, that names the one it is there for."""
    failed, done = trajectory.turns.values()
    assert failed.failed is not None
    assert "connection was reset" in failed.failed.error
    assert (failed.completed, failed.delivered) == (None, None)
    assert done.completed is not None
    assert (done.failed, done.delivered) == (None, "sent")
    assert done.completed.reply["content"] == text
    assert done.requested.wire["instead_of"] == failed.turn_id
    assert "instead_of" not in failed.requested.wire
    assert done.requested.request_id == failed.requested.request_id
    assert done.requested.parent_turn_id == failed.requested.parent_turn_id
    assert trajectory.messages(done) == trajectory.messages(failed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_who_has_seen_nothing_is_answered_by_another(two: Any, kind: str, stream: bool) -> None:
    """Whole, under the new turn's id, through each of the APIs; the next request goes on from it."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a" + PATHS[kind], asked(kind, stream=stream))
        await exchange.until(lambda: two.one.prompts)
        two.one.killed.set()
        return await exchange.end()

    reply = two.run(scenario())
    assert reply.status == 200
    whole = together(kind, reply.data) if stream else reply.json
    assert text_in(kind, whole) == "Hi from another"
    trajectory = only(two)
    check_asked_again(trajectory, "Hi from another")
    assert reply.headers["x-rollbook-turn-id"] == list(trajectory.turns)[1]
    assert list(trajectory.turns)[1] in whole["id"].replace("_", "-")
    assert next(iter(trajectory.turns)) not in reply.data.decode()
    live = two.recorder.find("a")
    assert (live.running, live.sending, live.calls) == (0, 0, [])


def test_a_sync_that_begins_just_as_a_request_was_let_in(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once more: no engine was asked, so nothing failed, and it has one turn."""
    let_in = two.engine.ready

    async def ready() -> None:
        await let_in()
        if not begun:
            begun.append(True)
            for url in URLS:
                two.engine.on_sync(SyncStarted("actor", 1, "s", url, "disk"))
            asyncio.get_running_loop().call_later(0.05, finish)

    def finish() -> None:
        assert (two.one.prompts, two.other.prompts) == ([], [])
        two.engine.on_sync(SyncFinished("actor", 1, "s", URLS[1], 1, 0.1))

    async def scenario() -> Any:
        return await two.exchange("/t/a/v1/chat/completions", asked("chat")).end()

    begun: list[bool] = []
    monkeypatch.setattr(two.engine, "ready", ready)
    reply = two.run(scenario())
    assert (reply.status, text_in("chat", reply.json)) == (200, "Hi from another")
    [turn] = only(two).turns.values()
    assert (turn.failed, turn.delivered) == (None, "sent")


def test_pieces_that_nobody_saw_are_not_sent(two: Any) -> None:
    """The engine dies in the same moment in which its first tokens come: they are of a turn that failed."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat", stream=True))
        await exchange.until(lambda: two.one.prompts)
        [turn] = two.recorder.find("a").calls[0].turns
        hears(turn, two)
        two.one.killed.set()
        return await exchange.end()

    reply = two.run(scenario())
    assert text_in("chat", together("chat", reply.data)) == "Hi from another"
    check_asked_again(only(two), "Hi from another")


def test_nothing_of_a_failed_turn_is_sent_while_another_engine_is_waited_for(two: Any) -> None:
    """Its tokens are forgotten at once, and what keeps the connection alive says the new turn's id."""

    async def scenario() -> Any:
        two.other.pace = asyncio.Semaphore(0)
        two.engine.on_sync(SyncStarted("actor", 1, "s", URLS[1], "disk"))
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat", stream=True))
        await exchange.until(lambda: two.one.prompts)
        running = two.recorder.find("a").calls[0]
        hears(running.turns[0], two)
        two.one.killed.set()
        await exchange.until(lambda: running.turns[0].requested.wire.get("instead_of"))
        running.changed()
        await asyncio.sleep(0.02)
        assert not exchange.status
        two.engine.on_sync(SyncFinished("actor", 1, "s", URLS[1], 1, 0.1))
        two.other.pace = None
        return await exchange.end()

    reply = two.run(scenario())
    assert text_in("chat", together("chat", reply.data)) == "Hi from another"
    check_asked_again(only(two), "Hi from another")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_had_begun_ends_with_the_error(two: Any, kind: str) -> None:
    """Its client has tokens of a turn that failed: it must not get others behind them."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a" + PATHS[kind], asked(kind, stream=True))
        for _ in range(4):
            two.one.pace.release()
        await exchange.until(lambda: "Hel" in text_of(kind, exchange.data) if exchange.data else False)
        two.one.killed.set()
        return await exchange.end()

    reply = two.run(scenario())
    assert b"engine_failed" in reply.data or b"connection was reset" in reply.data
    assert b"another" not in reply.data
    assert not any(word in reply.data for word in TERMINATORS[kind][1:])
    [turn] = only(two).turns.values()
    assert turn.failed is not None
    assert (turn.completed, turn.delivered) == (None, None)
    assert two.other.prompts == []


def test_siblings_are_asked_again_one_by_one(two: Any) -> None:
    """Of two completions of a request, both of which ran on the engine that died, each has its new turn."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat", n=2))
        await exchange.until(lambda: len(two.one.prompts) == 2)
        two.one.killed.set()
        return await exchange.end()

    reply = two.run(scenario())
    assert [c["message"]["content"] for c in reply.json["choices"]] == ["Hi from another"] * 2
    turns = list(only(two).turns.values())
    done = [turn for turn in turns if turn.completed]
    assert len(turns) == 4
    assert {t.requested.wire["instead_of"] for t in done} == {t.turn_id for t in turns if t.failed}
    assert len({t.requested.request_id for t in turns}) == 1


def test_a_client_that_leaves_meanwhile_is_not_asked_for_again(two: Any) -> None:
    """Nobody waits for the answer: the turn that was to be asked anew fails, and no engine gets it."""

    async def scenario() -> None:
        two.engine.on_sync(SyncStarted("actor", 1, "s", URLS[1], "disk"))
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat"))
        await exchange.until(lambda: two.one.prompts)
        running = two.recorder.find("a").calls[0]
        two.one.killed.set()
        await exchange.until(lambda: "instead_of" in running.turns[0].requested.wire)
        exchange.leave()
        await exchange.until(lambda: running.abandoned)
        two.engine.on_sync(SyncFinished("actor", 1, "s", URLS[1], 1, 0.1))
        await exchange.until(running.done.done)

    two.run(scenario())
    first, other = only(two).turns.values()
    assert "connection was reset" in first.failed.error  # type: ignore[union-attr]
    assert "client left" in other.failed.error  # type: ignore[union-attr]
    assert two.other.prompts == []


def test_engines_that_die_one_after_the_other(two: Any) -> None:
    """There is an end to asking: the client is told, every turn of it has failed, and a retry is answered."""
    two.turn_runner.hold_s = 0.2

    def dies(prompt: Any, sampling: Any) -> Any:
        return EngineLostError("this one too")

    async def scenario() -> Any:
        two.other.answer, answer = dies, two.other.answer
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat"))
        await exchange.until(lambda: two.one.prompts)
        two.one.killed.set()
        await exchange.end()
        two.other.answer = answer
        retry = {"x-stainless-retry-count": "1"}
        return exchange, await two.exchange("/t/a/v1/chat/completions", asked("chat"), headers=retry).end()

    first, second = two.run(scenario())
    assert first.status == 502
    assert first.json["error"]["code"] == "engine_failed"
    assert (second.status, text_in("chat", second.json)) == (200, "Hi from another")
    *failed, done = only(two).turns.values()
    assert [turn.failed is not None for turn in failed] == [True] * 4
    assert done.completed is not None
    assert "instead_of" not in done.requested.wire


def test_a_retry_of_what_was_asked_again_is_the_same_answer(two: Any) -> None:
    """Also after the proxy began anew: of the turns of that request only those count that answered it."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat"))
        await exchange.until(lambda: two.one.prompts)
        two.one.killed.set()
        first = await exchange.end()
        retry = {"x-stainless-retry-count": "1"}
        second = await two.exchange("/t/a/v1/chat/completions", asked("chat"), headers=retry).end()
        return first, second

    first, second = two.run(scenario())
    assert second.json == first.json
    assert len(only(two).turns) == 2
    digest = next(iter(only(two).turns.values())).requested.wire["digest"]
    assert restored(only(two)).arrivals == {digest: (list(only(two).turns)[1],)}


def test_a_failed_sync_in_another_lane_moves_what_runs(two: Any) -> None:
    """The trainer writes into the log that it failed: the proxy follows, and asks elsewhere."""

    async def scenario() -> Any:
        exchange = two.exchange("/t/a/v1/chat/completions", asked("chat"))
        await exchange.until(lambda: two.one.prompts)
        with two.store.writer("train") as writer:
            for record in (
                SyncStarted("actor", 1, "s", URLS[0], "disk"),
                SyncFailed("actor", 1, "s", URLS[0], "out of memory"),
            ):
                writer.append([Event(record, RUN)]).result(10)
            await exchange.end()
            writer.append([Event(SyncFinished("actor", 2, "t", URLS[0], 1, 0.1), RUN)]).result(10)
            await exchange.until(lambda: two.engine.members[0].usable)
        return exchange

    reply = two.run(scenario())
    assert text_in("chat", reply.json) == "Hi from another"
    failed, _ = only(two).turns.values()
    assert "out of memory" in failed.failed.error  # type: ignore[union-attr]


def test_requests_wait_while_all_engines_are_synced(two: Any, tmp_path: Path) -> None:
    """And are answered as soon as one is done; events of another run are none of its business."""

    async def scenario() -> Any:
        with two.store.writer("train") as writer:

            def told(record: Any, run: str = RUN) -> None:
                writer.append([Event(record, run)]).result(10)

            for url in URLS:
                told(SyncStarted("actor", 1, url, url, "disk"))
            while any(member.usable for member in two.engine.members):
                await asyncio.sleep(0.002)
            exchange = two.exchange("/t/a/v1/chat/completions", asked("chat"))
            told(SyncFinished("actor", 1, URLS[0], URLS[0], 1, 0.1), "another")
            await asyncio.sleep(0.1)
            assert not exchange.status
            assert [
                turn.requested.wire.get("instead_of") for turn in two.recorder.find("a").calls[0].turns
            ] == [None]
            told(SyncFinished("actor", 1, URLS[1], URLS[1], 1, 0.1))
            return await exchange.end()

    assert text_in("chat", two.run(scenario()).json) == "Hi from another"
    assert two.one.prompts == []


# Servers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_a_server_that_breaks_the_connection(
    in_process: Callable[..., InProcess], chat: Callable[[str], ChatTokenizer], stream: bool, after: int
) -> None:
    """Over HTTP: a whole reply comes from the other server, and a stream unless some of it was sent."""
    tokenizer = chat("chatml")

    def says(text: str, failure: Failure | None = None) -> ScriptedSGLang:
        ids = [*tokenizer.encode(text).tolist(), tokenizer.stop_ids[0]]
        answer = Answer(ids, token_s=0.02, versions=((0, "1"),), failure=failure)
        return ScriptedSGLang(lambda *_: answer, Options(weight_version="1"))

    broken = says("Hello from one", Failure(after, "drop"))
    with serving(broken) as first, serving(says("Hi from another")) as second:
        proxy = in_process(
            Fleet({url: SglangEngine(url, ToldWeights()) for url in (first, second)}), tokenizer
        )
        reply = proxy.ask("/t/a/v1/chat/completions", asked("chat", stream=stream))
    failed, *others = only(proxy).turns.values()
    assert failed.failed is not None
    if stream and after:
        assert b"engine_failed" in reply.data
        assert others == []
    else:
        whole = together("chat", reply.data) if stream else reply.json
        assert text_in("chat", whole) == "Hi from another"
        [done] = others
        assert (done.requested.wire["instead_of"], done.delivered) == (failed.turn_id, "sent")
