"""Fixtures of the record-only tests: an upstream that says what it is given, and the proxy before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.upstreams.server import HttpUpstream

from rollbook import store
from rollbook.engines.address import EngineAddress
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.upstream.proxy import SERVER_OPTIONS, Upstream, build_upstream_app
from rollbook.store.fold.trajectory import Trajectory, fold


class Passed:
    """The record-only proxy of one store, over HTTP, in a thread of this process."""

    def __init__(self, path: Path, upstream: Upstream, **given: Any) -> None:
        self.path = path
        self.recorder = Recorder(store.open(path, create=True), "serve", "default")
        app = build_upstream_app(self.recorder, upstream, *proxy_parts(**given))
        settings: Any = {"log_level": "critical", "port": 0, **SERVER_OPTIONS}
        self._server = uvicorn.Server(uvicorn.Config(app, **settings))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.http = httpx.Client(base_url=self.url, timeout=30)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, name: str | None = "t", **options: Any) -> httpx.Response:
        """POST to an endpoint, in a trajectory."""
        prefix = "" if name is None else f"/t/{name}"
        return self.http.post(prefix + path, json=body, **options)

    def chat(self, *messages: Any, name: str | None = "t", **body: Any) -> httpx.Response:
        """One chat request."""
        return self.post("/v1/chat/completions", {"model": "m", "messages": list(messages)} | body, name)

    def finish(self, name: str = "t", **body: Any) -> httpx.Response:
        """The end of a trajectory."""
        return self.http.post(f"/v1/trajectories/{name}/finish", json=body)

    def metric(self, name: str) -> float:
        """A number at /metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split()[0] == name)

    def trajectories(self) -> dict[str, Trajectory]:
        """What the log holds, by name."""
        return {t.opened.name: t for t in fold(store.open(self.path).events()).values()}

    def turns(self, name: str = "t", count: int = 1, *, ended: bool = True) -> list[Any]:
        """A trajectory's turns, once there are so many that have ended and were noted as delivered or not."""
        deadline = time.monotonic() + 30
        while True:
            quiet = self._quiet()  # asked before the log is read, or it might be of a later moment
            trajectory = self.trajectories().get(name)
            turns = list(trajectory.turns.values()) if trajectory else []
            over = [t for t in turns if t.completed or t.failed]
            if len(turns) >= count and (not ended or (len(over) == len(turns) and quiet)):
                return turns
            assert time.monotonic() < deadline, f"{len(over)} of {len(turns)} turns ended"
            time.sleep(0.01)

    def _quiet(self) -> bool:
        """Whether nothing is on its way, to a client or to the log."""
        recorder = self.recorder
        idle = all(not t.sending and not t.running for t in recorder.open_trajectories())
        return idle and not recorder._waiting and (recorder._last is None or recorder._last.done())

    def turn(self, name: str = "t") -> Any:
        """A trajectory's only turn."""
        [turn] = self.turns(name)
        return turn

    def sql(self, query: str) -> list[Any]:
        """Rows."""
        with store.connect(self.path) as connection:
            return connection.execute(query).fetchall()

    def bytes_on_disk(self) -> bytes:
        """Every byte of the store."""
        return b"".join(p.read_bytes() for p in sorted(self.path.rglob("*")) if p.is_file())

    def close(self) -> None:
        """Stop it."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture
def passing(tmp_path: Path, upstream: HttpUpstream) -> Iterator[Callable[..., Passed]]:
    """Makes proxies before the upstream; stops them."""
    proxies: list[Passed] = []

    def make(key: str | None = None, ask: Any = None, url: str | None = None, **options: Any) -> Passed:
        for proxy in proxies:
            proxy.close()
        target = Upstream(EngineAddress.of(url or upstream.url), key, ask)
        proxies.append(Passed(tmp_path / "store", target, **options))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def passed(passing: Callable[..., Passed]) -> Passed:
    """The proxy before the upstream."""
    return passing()
