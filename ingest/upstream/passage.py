"""A reply on its way from an upstream to a client: every byte as it comes, and a copy for the log."""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.responses import Response

from rollbook.ingest.redact import Redactor, changes_conversation
from rollbook.ingest.upstream.credentials import given_cookies
from rollbook.ingest.upstream.record import PassageRecorder, Passing
from rollbook.ingest.upstream.reply import UpstreamReply, read_reply
from rollbook.ingest.upstream.stream import EndFinder, events_of, gathered, json_of
from rollbook.ingest.upstream.target import end_to_end
from rollbook.ingest.upstream.watch import ClientGone, ClientWatch
from rollbook.store.errors import RequestError
from rollbook.store.events import Json
from rollbook.store.redaction import shown

ERROR_LENGTH = 2000
"""Of an upstream's error, so many characters are recorded."""


class Passage(Response):
    """Sends what the upstream says, and has it recorded.

    Args:
        path: the endpoint's.
        told: headers of ours, beside the upstream's.
        left: called at the end, however it came.
        secrets: gives what an error must not repeat on disk, such as the keys that were sent.
    """

    def __init__(
        self,
        reply: aiohttp.ClientResponse,
        path: str,
        passages: PassageRecorder,
        passing: Passing | None,
        watch: ClientWatch,
        told: dict[str, str],
        left: Callable[[], None],
        secrets: Callable[[], set[str]] = set,
    ) -> None:
        self._reply, self._path, self._passages, self._passing = reply, path, passages, passing
        self._watch, self._told, self._left, self._secrets = watch, told, left, secrets
        self._copy: list[bytes] = []
        self._ended = self._delivered = False
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the reply on; a client that goes away ends the upstream's work too."""
        try:
            await self._watch.race(self._pass_on(send))
        except (ClientGone, aiohttp.ClientError, OSError, RequestError):
            pass  # a reply that does not end cuts the client's connection, as the upstream's was
        finally:
            self._watch.close()
            self._reply.close()
            self._left()
            if self._passing is not None:
                await self._close(self._passing)

    async def _pass_on(self, send: Any) -> None:
        reply, passing = self._reply, self._passing
        ours = {name.encode(): value.encode("latin-1") for name, value in self._told.items()}
        theirs = [(name, value) for name, value in end_to_end(reply.raw_headers) if name not in ours]
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": [*theirs, *ours.items()]}
        )
        left = int(reply.headers.get("content-length", -1))
        finder = EndFinder(self._path) if passing is not None and self._streams else None
        async for data in reply.content.iter_any():
            if passing is not None:
                self._copy.append(data)
                left -= len(data)
                # The client may act on the end before we hear that there is no more.
                if left == 0 or (finder is not None and finder.feed(data)):
                    self._settle(passing, ended=True)
                    await self._passages.kept(passing)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._delivered = self._ended and not self._watch.gone
        if passing is not None:
            self._settle(passing, ended=True)
            await self._passages.kept(passing)
        there = not self._watch.gone
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._delivered = self._delivered or there

    @property
    def _streams(self) -> bool:
        return "event-stream" in self._reply.headers.get("content-type", "")

    async def _close(self, passing: Passing) -> None:
        try:
            self._settle(passing, ended=False)
            await self._passages.durable(passing, delivered=self._delivered)
        finally:
            passing.left()

    def _settle(self, passing: Passing, *, ended: bool) -> None:
        """Record what came, once; whatever happens, the reply passes on."""
        if passing.settled:
            return
        self._ended = ended
        try:
            data = plain_bytes(b"".join(self._copy), self._reply.headers.get("content-encoding", ""))
            if self._reply.status >= 400:
                self._passages.failed(passing, self._error(data))
            else:
                self._passages.settle(passing, self._read(passing, data), ended=ended)
        except Exception as error:
            print(shown(traceback.format_exc()), file=sys.stderr)
            self._passages.lost(len(passing.requested), f"a reply cannot be read: {error!r}")
            self._passages.failed(passing, f"the reply cannot be read: {type(error).__name__}")

    def _error(self, data: bytes) -> str:
        text = self._redactor().text(data[: 4 * ERROR_LENGTH].decode(errors="replace"))
        return f"the upstream answers {self._reply.status}: {text[:ERROR_LENGTH]}"

    def _redactor(self) -> Redactor:
        """What takes out of an error also what this request and this reply had for secrets."""
        known = self._secrets() | given_cookies(self._reply.raw_headers)
        return self._passages.redactor.knowing(known)

    def _read(self, passing: Passing, data: bytes) -> UpstreamReply:
        body: Any = gathered(self._path, events_of(data)) if self._streams else json_of(data)
        if not isinstance(body, dict):
            return read_reply(self._path, {})
        redactor = self._redactor() if body.get("error") else self._passages.redactor
        clean: Json = redactor.body(body)
        passing.redacted = passing.redacted or changes_conversation(body, clean)
        return read_reply(self._path, clean)


def plain_bytes(data: bytes, encoding: str) -> bytes:
    """A body without its content encoding; as far as it came.

    Raises:
        ValueError: it has one that is not known here.
        zlib.error: it is not encoded so.
    """
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name in ("gzip", "x-gzip", "deflate"):
            data = zlib.decompressobj(wbits=47 if name != "deflate" else 15).decompress(data)
        elif name not in ("", "identity"):
            raise ValueError(f"a body is encoded as {name}")
    return data
