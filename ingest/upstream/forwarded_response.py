"""The reply of an upstream: passes every byte to the client as it comes, and keeps a copy for the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.responses import Response

from rollbook.ingest.endpoints.sse import events_of, json_of
from rollbook.ingest.endpoints.upstream_reply import MOST_CHOICES, UpstreamReply
from rollbook.ingest.http.content_encoding import codings, decoded
from rollbook.ingest.http.disconnect import ClientGone, ClientWatch
from rollbook.ingest.http.forwarding import end_to_end
from rollbook.ingest.recording.redact import Redactor, changes_conversation
from rollbook.ingest.requests.json_bounds import check_weight
from rollbook.ingest.requests.large_work import LARGE_BYTES, aside
from rollbook.ingest.upstream.credentials import given_cookies
from rollbook.ingest.upstream.forwarded_call import ForwardedCall
from rollbook.ingest.upstream.recorder import UpstreamRecorder
from rollbook.ingest.upstream.reply import gathered, read_reply
from rollbook.ingest.upstream.reply_copy import ReplyCopy
from rollbook.ingest.upstream.stream import EndFinder
from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import Json

ERROR_LENGTH = 2000
"""Characters of an upstream's error that are recorded."""


class ForwardedResponse(Response):
    """Sends the upstream's reply, and has it recorded.

    Args:
        forwarded: the request as recorded; None: it is not recorded.
        headers: headers of ours, beside the upstream's.
        left: called at the end, however it came.
        secrets: gives what an error must not repeat on disk, such as the keys that were sent.
    """

    def __init__(
        self,
        reply: aiohttp.ClientResponse,
        recording: UpstreamRecorder,
        forwarded: ForwardedCall | None,
        watch: ClientWatch,
        headers: dict[str, str],
        left: Callable[[], None],
        secrets: Callable[[], set[str]] = set,
    ) -> None:
        self._reply, self._recording, self._forwarded = reply, recording, forwarded
        self._watch, self._own_headers, self._left, self._secrets = watch, headers, left, secrets
        self._copy = ReplyCopy(recording.room)
        self._ended = self._delivered = False
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward the reply; a client that disconnects ends the upstream's request too."""
        try:
            await self._watch.race(self._pass_on(send))
        except (ClientGone, aiohttp.ClientError, OSError, RequestError):
            pass  # an incomplete reply closes the client's connection, as the upstream's was
        finally:
            self._watch.close()
            self._reply.close()
            self._left()
            if self._forwarded is not None:
                await self._close(self._forwarded)

    async def _pass_on(self, send: Any) -> None:
        reply, forwarded = self._reply, self._forwarded
        ours = {name.encode(): value.encode("latin-1") for name, value in self._own_headers.items()}
        theirs = [(name, value) for name, value in end_to_end(reply.raw_headers) if name not in ours]
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": [*theirs, *ours.items()]}
        )
        left = int(reply.headers.get("content-length", -1))
        finder = None
        if forwarded is not None and self._streams:
            finder = EndFinder(forwarded.api.upstream.last_event)
        async for data in reply.content.iter_any():
            if forwarded is not None:
                self._copy.add(data)
                left -= len(data)
                # The client may act on the end before the upstream closes the stream.
                if left == 0 or (finder is not None and finder.feed(data)):
                    await self._settle(forwarded, ended=True)
                    await self._recording.kept(forwarded)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._delivered = self._ended and not self._watch.gone
        if forwarded is not None:
            await self._settle(forwarded, ended=True)
            await self._recording.kept(forwarded)
        there = not self._watch.gone
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._delivered = self._delivered or there

    @property
    def _streams(self) -> bool:
        return "event-stream" in self._reply.headers.get("content-type", "")

    async def _close(self, forwarded: ForwardedCall) -> None:
        try:
            await self._settle(forwarded, ended=self._ended)
            await self._recording.durable(forwarded, delivered=self._delivered)
        finally:
            forwarded.left()

    async def _settle(self, forwarded: ForwardedCall, *, ended: bool) -> None:
        """Record what came, once. The reply is forwarded whatever happens here.

        A client's disconnect cancels it; then `_close` records it at the end.
        """
        if forwarded.settled:
            return
        self._ended = ended
        try:
            if self._copy.given_up:
                text = f"a reply of more than {self._recording.room.each} bytes, or the largest of too many"
                raise LimitError(413, "reply_too_large", f"{text}: it passed on, see --max-reply-mb")
            found = await self._understood(forwarded)
            if isinstance(found, str):
                self._recording.failed(forwarded, found)
            else:
                self._recording.settle(forwarded, found, ended=ended)
        except Exception as error:
            self._unreadable(forwarded, error)
        self._copy.close()

    def _unreadable(self, forwarded: ForwardedCall, error: Exception) -> None:
        if isinstance(error, LimitError):
            self._recording.metrics.refused(error.code)
        elif not isinstance(error, RequestError):
            logging.getLogger(__name__).exception("rollbook: a reply cannot be read")
        self._recording.lost(len(forwarded.requested), f"a reply cannot be read: {error!r}")
        why = error.message if isinstance(error, RequestError) else type(error).__name__
        self._recording.failed(forwarded, f"the reply cannot be read: {why}")

    async def _understood(self, forwarded: ForwardedCall) -> UpstreamReply | str:
        """The reply, or the text of the error that it is; a large one is read in a thread."""
        data, encoding = self._copy.whole(), self._reply.headers.get("content-encoding", "")
        # An error is searched for the secrets of its request, which may be large.
        if len(data) > LARGE_BYTES or codings(encoding) or self._reply.status >= 400:
            return await aside(self._read, forwarded, data, encoding)
        return self._read(forwarded, data, encoding)

    def _error(self, data: bytes) -> str:
        text = self._redactor().text(data[: 4 * ERROR_LENGTH].decode(errors="replace"))
        return f"the upstream answers {self._reply.status}: {text[:ERROR_LENGTH]}"

    def _redactor(self) -> Redactor:
        """A redactor that also knows the secrets of this request and its reply."""
        known = self._secrets() | given_cookies(self._reply.raw_headers)
        return self._recording.redactor.knowing(known)

    def _read(self, forwarded: ForwardedCall, data: bytes, encoding: str) -> UpstreamReply | str:
        data = decoded(data, encoding, self._recording.room.each, whole=False)
        if self._reply.status >= 400:
            return self._error(data)
        check_weight(data)
        form = forwarded.api.upstream
        body: Any = gathered(form, events_of(data)) if self._streams else json_of(data)
        if not isinstance(body, dict):
            return read_reply(form, {})
        redactor = self._redactor() if body.get("error") else self._recording.redactor
        clean: Json = redactor.body(body)
        forwarded.redacted = forwarded.redacted or changes_conversation(body, clean)
        reply = read_reply(form, clean)
        if len(reply.choices) > MOST_CHOICES:
            raise LimitError(413, "reply_too_large", f"a reply of {len(reply.choices)} choices")
        return reply
