"""A proxy in this process, called through httpx."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from tests.fakes.clients.exchange import Exchange
from tests.fakes.proxies.desk import make_turn_runner
from tests.fakes.proxies.settings import proxy_parts

from rollbook import store
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.serve.proxy import build_app
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.fold.trajectory import Trajectory, fold


class InProcess:
    """The proxy as an ASGI application with its lifespan, called through httpx."""

    def __init__(self, path: Path, engine: Any, tokenizer: ChatTokenizer, **given: Any) -> None:
        self.store = store.open(path, create=True)
        self.recorder = Recorder(self.store, "serve", "default")
        self.engine = engine
        self.turn_runner = make_turn_runner(self.recorder, engine, tokenizer)
        self.app = build_app(self.turn_runner, *proxy_parts(**given))
        self.runner = asyncio.Runner()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.runner.run(self._lifespan.__aenter__())
        # A handler that raises must come out as the 500 that a server would send.
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the application's loop."""
        return self.runner.run(awaitable)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST."""
        return self.run(self.client.post(path, **options))

    def chat(self, name: str, *messages: Any, **body: Any) -> httpx.Response:
        """One chat request in the trajectory `name`."""
        return self.post(f"/t/{name}/v1/chat/completions", json={"messages": list(messages)} | body)

    def exchange(self, path: str, body: Any = None, **options: Any) -> Exchange:
        """Begin a request; to be called on the application's loop."""
        return Exchange(self.app, path, body, **options)

    def ask(self, path: str, body: Any = None, **options: Any) -> Exchange:
        """A request and its whole reply, piece by piece as it was sent."""

        async def ask() -> Exchange:
            return await self.exchange(path, body, **options).end()

        return self.run(ask())

    def settled(self) -> None:
        """Wait for what was noted without waiting."""
        self.run(self.recorder.settle())

    def trajectories(self) -> dict[str, Trajectory]:
        """What the log holds now, by the client's name."""
        self.settled()
        return {t.opened.name: t for t in fold(self.store.events()).values()}

    def close(self) -> None:
        """End the application's lifespan."""
        self.run(self.client.aclose())
        self.run(self._lifespan.__aexit__(None, None, None))
        self.runner.close()
