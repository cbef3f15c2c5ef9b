"""What openai's client does when a reply does not arrive, with something between it and the proxy that fails.

Its retries carry x-stainless-retry-count: so each request is generated once, as long as the first attempt
was not given up by everybody.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from tests.clients.conftest import Proxy, Run
from tests.clients.programs.conversation import ANSWER, QUESTION

from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.select.samples import samples_of

SLOWLY = f"{QUESTION} Answer slowly."


@dataclass(slots=True, eq=False)
class Between:
    """A server that passes requests on, and fails the first of them in one way.

    Attributes:
        fault: `cut`: the reply came, and the connection breaks. `503`: it came, and an error is sent.
            `hasty`: the connection breaks at once, and the request is kept up. `gone`: both break.
        retries: what each request said of itself as a retry.
    """

    proxy: str
    fault: str
    retries: list[str | None] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """What answers."""
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                between.answer(self)

            def log_message(self, *_: Any) -> None:
                """Not on the terminal."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Pass a request on, and the reply back unless it is the one to fail."""
        body = request.rfile.read(int(request.headers["content-length"]))
        with self._lock:
            self.retries.append(request.headers.get("x-stainless-retry-count"))
            fails = len(self.retries) == 1
        if fails and self.fault == "hasty":
            _cut(request)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        patience = 0.4 if fails and self.fault == "gone" else 60
        try:
            reply = httpx.post(self.proxy + request.path, content=body, headers=headers, timeout=patience)
        except httpx.ReadTimeout:
            _cut(request)
            return
        if fails and self.fault == "cut":
            _cut(request)
        if fails and self.fault != "503":
            return
        request.send_response(503 if fails else reply.status_code)
        request.send_header("content-type", reply.headers["content-type"])
        request.send_header("content-length", str(len(reply.content)))
        request.end_headers()
        request.wfile.write(reply.content)


def _cut(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between(proxy: Proxy) -> Iterator[Callable[[str], tuple[Between, str]]]:
    """Starts such a server; stops it."""
    servers: list[ThreadingHTTPServer] = []

    def start(fault: str) -> tuple[Between, str]:
        faulty = Between(proxy.url, fault)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), faulty.handler()))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return faulty, f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _counted(proxy: Proxy) -> dict[str, float]:
    page = httpx.get(f"{proxy.url}/metrics").text
    return {how: float(n) for how, n in re.findall(r'rollbook_retries_total{how="(\w+)"} (\S+)', page)}


def _gained(proxy: Proxy, before: dict[str, float]) -> dict[str, float]:
    gained = {how: count - before.get(how, 0) for how, count in _counted(proxy).items()}
    return {how: count for how, count in gained.items() if count}


@pytest.mark.parametrize("words", [(), ("stream",)], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "how"), [("cut", "replayed"), ("503", "replayed"), ("hasty", "joined")], ids=str
)
def test_a_retry_is_no_second_generation(
    fault: str,
    how: str,
    words: tuple[str, ...],
    proxy: Proxy,
    run: Run,
    between: Callable[[str], tuple[Between, str]],
) -> None:
    """The retry gets the reply that the first attempt made, or is making."""
    name, before = proxy.new_name(), _counted(proxy)
    failing, url = between(fault)
    question = SLOWLY if fault == "hasty" else QUESTION
    output = run("openai_chat.py", *words, at=f"{url}/t/{name}", ROLLBOOK_QUESTION=question)
    assert output.answer == ANSWER
    assert failing.retries == ["0", "1", "0", "0"]
    assert _gained(proxy, before) == {how: 1}
    trajectory = proxy.trajectory(name)
    assert _links(trajectory) == [None, 0, 1]
    [sample] = samples_of(trajectory)
    turns = list(trajectory.turns.values())
    assert [t.delivered for t in turns] == ["sent"] * 3
    for turn in turns:
        assert turn.completed is not None
        assert turn.completed.completion_ids.tolist() == proxy.made(trajectory, turn).tolist()
    assert int(sample.loss_mask.sum()) == sum(len(t.completed.completion_ids) for t in turns if t.completed)
    calls = [call["id"] for shown in output.turns for call in shown["calls"]]
    assert calls == [
        f"call-{turn.turn_id}-{index}"
        for turn, count in zip(turns, (1, 2), strict=False)
        for index in range(count)
    ]


def _links(trajectory: Trajectory) -> list[int | None]:
    places = {turn_id: i for i, turn_id in enumerate(trajectory.turns)}
    return [places.get(t.requested.parent_turn_id or "") for t in trajectory.turns.values()]


@pytest.mark.parametrize("words", [(), ("stream",)], ids=["whole", "stream"])
def test_a_request_without_waiting_clients_is_aborted(
    words: tuple[str, ...], proxy: Proxy, run: Run, between: Callable[[str], tuple[Between, str]]
) -> None:
    """What was sampled by then is recorded and never trained; the retry is a generation of its own."""
    name, before = proxy.new_name(), _counted(proxy)
    _, url = between("gone")
    output = run("openai_chat.py", *words, at=f"{url}/t/{name}", ROLLBOOK_QUESTION=SLOWLY)
    assert output.answer == ANSWER
    assert _gained(proxy, before) == {}
    trajectory = proxy.trajectory(
        name, lambda t: len(t.turns) == 4 and bool([*t.turns.values()][3].delivered)
    )
    assert _links(trajectory) == [None, None, 1, 2]
    turns = list(trajectory.turns.values())
    assert [t.delivered for t in turns] == [None, "sent", "sent", "sent"]
    assert [t.requested.wire.get("retry") for t in turns] == [None, 1, None, None]
    assert [t.completed.finish_reason for t in turns if t.completed] == [
        "abort",
        "tool_calls",
        "tool_calls",
        "stop",
    ]
    lost, kept = samples_of(trajectory)
    assert not lost.loss_mask.any()
    sampled = [i for turn in turns[1:] for i in proxy.made(trajectory, turn).tolist()]
    assert kept.tokens[kept.loss_mask].tolist() == sampled
