"""Clients that go away: the engine is told, what it had sampled is kept, and nobody trains on it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.fakes.clients import streamed
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import all_samples

CHAT = PATHS["chat"]


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played("Hello, you there")


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that waits for a word."""
    engine = proxy.engine
    engine.answer = lambda *_: "Hello, you there"
    engine.pace = None
    engine.prompts.clear()
    engine.aborted.clear()
    engine.doors.set()


def _trained(proxy: Any, name: str) -> int:
    """How many tokens of the trajectory could ever be trained."""
    return sum(int(s.loss_mask.sum()) for s in all_samples([proxy.trajectories()[name]]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_in_the_middle(proxy: Any, kind: str, stream: bool) -> None:
    """The engine's request is aborted, its last chunk awaited; the partial turn is kept and not trained."""
    engine, name = proxy.engine, f"middle-{kind}-{stream}"
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> Any:
        reply = proxy.exchange(f"/t/{name}{PATHS[kind]}", asked(kind, stream=stream))
        await reply.until(lambda: engine.prompts)
        for _ in range(3):
            engine.pace.release()
        await asyncio.sleep(0.02)
        reply.leave()
        await reply.end()
        await proxy.turn_runner.drained()
        return reply

    reply = proxy.run(scenario())
    assert not reply.ended
    assert reply.error is None
    (turn,) = proxy.trajectories()[name].turns.values()
    assert engine.aborted == [turn.turn_id]
    ids = engine.tokenizer.encode("Hello, you there").tolist()
    assert turn.completed.completion_ids.tolist() == ids[:3]
    assert turn.completed.logprobs.tolist() == engine.made[-1].logprobs.tolist()
    assert turn.completed.finish_reason == "abort"
    assert (turn.delivered, turn.failed) == (None, None)
    assert _trained(proxy, name) == 0
    live = proxy.recorder.find(name)
    assert (live.running, live.sending) == (0, 0)
    if stream:
        text = streamed.text_of(kind, reply.data)
        assert "Hello, you there".startswith(text)
        assert text == engine.tokenizer.decode(ids[:3])
    assert proxy.ask(f"/v1/trajectories/{name}/finish", {"reward": 1}).status == 200


def test_all_choices_are_aborted(proxy: Any) -> None:
    """Each of n, by its own id."""
    engine = proxy.engine
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/choices{CHAT}", asked("chat", n=3))
        await reply.until(lambda: len(engine.prompts) == 3)
        for _ in range(9):
            engine.pace.release()
        await asyncio.sleep(0.02)
        reply.leave()
        await reply.end()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    turns = proxy.trajectories()["choices"].turns
    assert sorted(engine.aborted) == sorted(turns)
    assert [t.completed.finish_reason for t in turns.values()] == ["abort"] * 3
    assert sum(len(t.completed.completion_ids) for t in turns.values()) == 9


def test_an_engine_that_cannot_abort_runs_to_its_end(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is kept, whole and undelivered."""

    async def nothing(request_id: str) -> None:
        return

    engine = proxy.engine
    engine.pace = asyncio.Semaphore(0)
    monkeypatch.setattr(engine, "abort", nothing)

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/whole{CHAT}", asked("chat"))
        await reply.until(lambda: engine.prompts)
        reply.leave()
        await reply.end()
        for _ in range(50):
            engine.pace.release()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    (turn,) = proxy.trajectories()["whole"].turns.values()
    assert turn.completed.reply["content"] == "Hello, you there"
    assert (turn.completed.finish_reason, turn.delivered) == ("stop", None)
    assert _trained(proxy, "whole") == 0


def test_an_abort_before_the_first_token(proxy: Any) -> None:
    """An engine that sampled nothing says so; the turn has failed or is empty, and is no sample."""
    engine = proxy.engine
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/nothing{CHAT}", asked("chat"))
        await reply.until(lambda: engine.prompts)
        reply.leave()
        await reply.end()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    (turn,) = proxy.trajectories()["nothing"].turns.values()
    assert turn.completed.completion_ids.tolist() == []
    assert turn.completed.finish_reason == "abort"
    assert _trained(proxy, "nothing") == 0


def test_leaving_when_all_is_said_marks_nothing(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed, but the client had gone before the end could be sent: not delivered, not trained."""
    engine, recorder = proxy.engine, proxy.recorder
    engine.made.clear()
    write = recorder.write
    written = asyncio.Event()

    async def late(*records: Any, **behind: Any) -> Any:
        done = await write(*records, **behind)
        await written.wait()
        return done

    monkeypatch.setattr(recorder, "write", late)

    async def scenario() -> Any:
        reply = proxy.exchange(f"/t/late{CHAT}", asked("chat", stream=True))
        await reply.until(lambda: reply.parts and streamed.text_of("chat", reply.data) == "Hello, you there")
        await reply.until(lambda: engine.made)
        reply.leave()
        await asyncio.sleep(0.01)
        written.set()
        await reply.end()
        await proxy.turn_runner.drained()
        return reply

    reply = proxy.run(scenario())
    assert b"[DONE]" not in reply.data
    (turn,) = proxy.trajectories()["late"].turns.values()
    assert turn.completed.finish_reason == "stop"
    assert turn.delivered is None
    assert _trained(proxy, "late") == 0


def test_an_echo_proves_the_delivery(proxy: Any) -> None:
    """A reply that seemed lost and is shown by a later request was received after all: it is trained."""
    path = f"/t/echo{CHAT}"
    engine = proxy.engine
    engine.answer = lambda *_: Play("Hi")
    real = type(proxy.recorder).mark_delivered
    lost = []

    def losing(live: Any, turn_id: str, how: str) -> None:
        if how == "sent":
            lost.append(turn_id)
        else:
            real(proxy.recorder, live, turn_id, how)

    proxy.recorder.mark_delivered = losing
    try:
        first = proxy.ask(path, asked("chat")).json
    finally:
        del proxy.recorder.mark_delivered
    assert _trained(proxy, "echo") == 0
    message = first["choices"][0]["message"]
    user = {"role": "user", "content": "go on"}
    proxy.ask(path, {"messages": [*asked("chat")["messages"], message, user]})
    parent, child = proxy.trajectories()["echo"].turns.values()
    assert lost == [parent.turn_id]
    assert (parent.delivered, child.delivered) == ("echoed", "sent")
    assert child.requested.parent_turn_id == parent.turn_id
    assert _trained(proxy, "echo") == len(parent.completed.completion_ids) + len(
        child.completed.completion_ids
    )


def test_waiting_clients_that_leave_are_not_answered(proxy: InProcess) -> None:
    """Gone while the engine was held: nothing is sampled for nobody, and the trajectory can be finished."""
    engine = proxy.engine
    engine.doors.clear()

    async def scenario() -> None:
        reply = proxy.exchange(f"/t/held{CHAT}", asked("chat"))
        await asyncio.sleep(0.02)
        reply.leave()
        await reply.end()
        engine.doors.set()
        await proxy.turn_runner.drained()

    proxy.run(scenario())
    (turn,) = proxy.trajectories()["held"].turns.values()
    assert engine.prompts == []
    assert turn.completed is None
    assert turn.failed is not None
    assert proxy.ask("/v1/trajectories/held/finish", {}).status == 200


# Over TCP -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script."""
    return serve("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer")


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    """Plain HTTP to the server."""
    with httpx.Client(base_url=server.url, timeout=30) as raw:
        yield raw


def _raw(server: Any, head: str, body: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    return sock


def test_half_a_body_is_no_request(server: Served, http: httpx.Client) -> None:
    """A client that dies while it sends opens nothing, and is no fault of the server's."""
    sock = _raw(
        server, f"POST /t/half{CHAT} HTTP/1.1\nHost: localhost\nContent-Length: 1000\n", b'{"messages": ['
    )
    time.sleep(0.1)
    sock.close()
    time.sleep(0.2)
    answer = http.post("/v1/trajectories/half/finish", json={})
    assert answer.status_code == 404
    assert "Traceback" not in server.log.read_text()


def test_a_reset_connection_is_noticed(server: Any, http: httpx.Client) -> None:
    """Also one that ends with RST: finishing awaits what still runs for nobody, which stays undelivered."""
    body = orjson.dumps(asked("chat", text="sleep 0.5"))
    sock = _raw(server, f"POST /t/reset{CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(body)}\n", body)
    while "reset" not in {t.opened.name for t in fold(store.open(server.path).events()).values()}:
        time.sleep(0.01)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    time.sleep(0.1)
    done = http.post("/v1/trajectories/reset/finish", json={})
    assert (done.status_code, done.json()["turns"]) == (200, 1)
    trajectories = fold(store.open(server.path).events()).values()
    (turn,) = next(t for t in trajectories if t.opened.name == "reset").turns.values()
    assert turn.completed.reply["content"] == "1: sleep 0.5"
    assert turn.delivered is None
    assert "Traceback" not in server.log.read_text()
