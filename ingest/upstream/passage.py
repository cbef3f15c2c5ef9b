"""A reply on its way from an upstream to a client: every byte as it comes, and a copy for the log."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
from starlette.responses import Response

from rollbook.ingest.upstream.record import PassageRecorder, Passing
from rollbook.ingest.upstream.reply import UpstreamReply, read_reply, read_stream
from rollbook.ingest.upstream.stream import events_of

NOT_PASSED = frozenset(("connection", "keep-alive", "transfer-encoding", "trailer", "upgrade"))


class Passage(Response):
    """Sends what the upstream says, then has it recorded."""

    def __init__(
        self,
        reply: aiohttp.ClientResponse,
        path: str,
        passages: PassageRecorder,
        passing: Passing | None,
        *,
        recorded: bool,
    ) -> None:
        self._reply, self._path, self._passages, self._passing = reply, path, passages, passing
        self._recorded = recorded
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the reply on; a client that goes away ends the upstream's work too."""
        copy: list[bytes] = []
        passing_on = asyncio.create_task(self._pass_on(send, copy))
        gone = asyncio.create_task(_until_gone(receive))
        error: BaseException | None = None
        try:
            await asyncio.wait({passing_on, gone}, return_when=asyncio.FIRST_COMPLETED)
            whole = passing_on.done()
            if whole:
                error = passing_on.exception()
        finally:
            for task in (gone, passing_on):
                task.cancel()
            await asyncio.gather(gone, passing_on, return_exceptions=True)
            self._reply.close()
        if self._passing is not None:
            await self._record(self._passing, b"".join(copy), whole=whole and error is None)
        if error is not None:
            raise error  # the connection is cut, as the upstream's was

    async def _pass_on(self, send: Any, copy: list[bytes]) -> None:
        reply = self._reply
        head = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in reply.headers.items()
            if name.lower() not in NOT_PASSED
        ]
        if self._passing is not None:
            turns = ",".join(r.turn_id for r in self._passing.requested)
            trajectory = self._passing.live.opened.trajectory_id
            head += [(b"x-rollbook-turn-id", turns.encode())]
            head += [(b"x-rollbook-trajectory-id", trajectory.encode())]
        elif not self._recorded:
            head.append((b"x-rollbook-unrecorded", b"1"))
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        async for data in reply.content.iter_any():
            if self._passing is not None:
                copy.append(data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _record(self, passing: Passing, data: bytes, *, whole: bool) -> None:
        passing.live.running -= 1
        if self._reply.status >= 400:
            text = data[:2000].decode(errors="replace")
            self._passages.failed(passing, f"the upstream answers {self._reply.status}: {text}")
            return
        reply = self._read(data)
        if not reply.choices:
            self._passages.failed(passing, "the upstream's reply holds no completion, or ended before one")
            return
        await self._passages.answered(passing, reply, whole=whole)

    def _read(self, data: bytes) -> UpstreamReply:
        if "event-stream" in self._reply.headers.get("content-type", ""):
            return read_stream(self._path, events_of(data))
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            body = None
        return read_reply(self._path, body if isinstance(body, dict) else {})


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
