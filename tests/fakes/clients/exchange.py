"""One request to an ASGI application, whose reply is taken piece by piece, by a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import orjson

PATIENCE_S = 20.0


class Exchange:
    """Begins at once, on the running loop. `error` is what the application raised, if it did."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        method: str = "POST",
    ) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        path, _, query = path.partition("?")
        pairs = [*(headers.items() if isinstance(headers, Mapping) else headers or ())]
        ours = {"content-length": str(len(raw)), "host": "127.0.0.1"}
        sent = [*((k, v) for k, v in ours.items() if k not in {name for name, _ in pairs}), *pairs]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in sent],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
        }
        self.status, self.headers = 0, dict[str, str]()
        self.parts: list[bytes] = []
        self.ended = False
        self.error: BaseException | None = None
        self._body: bytes | None = raw
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: Any, scope: Any) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            self.error = error

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a reply begins once"
            self.status = message["status"]
            self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
            return
        assert not self.ended, "nothing follows the end"
        if message.get("body"):
            self.parts.append(message["body"])
        if not message.get("more_body"):
            self.ended = True
            self._gone.set()

    @property
    def data(self) -> bytes:
        """What has come."""
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        """The whole reply as JSON."""
        return orjson.loads(self.data)

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something to come true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def end(self) -> Exchange:
        """Wait until the application is done with it."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self
