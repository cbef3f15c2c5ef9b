"""The reply of an upstream: passes every byte to the client as it comes, and keeps a copy for the log.

The end of a stream is found without parsing events as `edge.server_sent_events` does: an event of
any length passes, and of a long one only whether it is the last is held.

The secrets of the request and the reply are known, so that a recorded error of the upstream holds
none of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
from starlette.responses import Response

from rollbook.edge.bodies import codings, decoded
from rollbook.edge.bounds import LARGE_BYTES, check_weight, run_in_thread
from rollbook.edge.forwarding import end_to_end
from rollbook.edge.requests import ClientGone, ClientWatch
from rollbook.edge.server_sent_events import events_of, json_of
from rollbook.ingest.endpoints.api import UpstreamForm
from rollbook.ingest.endpoints.upstream_reply import MOST_CHOICES, NO_REPLY, UpstreamReply
from rollbook.ingest.recording.redact import Redactor, changes_conversation
from rollbook.ingest.upstream.forwarded_call import ForwardedCall
from rollbook.ingest.upstream.recorder import ReplyCopy, UpstreamRecorder
from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import Json
from rollbook.store.redaction import credentials, is_secret_name
from rollbook.store.redaction.text import grants_access

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
            reply = await self._understood(forwarded)
            if isinstance(reply, str):
                self._recording.failed(forwarded, reply)
            else:
                self._recording.settle(forwarded, reply, ended=ended)
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
            return await run_in_thread(self._read, forwarded, data, encoding)
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


_LONG_EVENT, _LONG_PATTERN = 1 << 20, 64
_BLANK = re.compile(rb"\r?\n\r?\n|\r\r")


class EndFinder:
    """Finds a stream's last event in its bytes, however they are cut into packets."""

    def __init__(self, last_event: re.Pattern[bytes]) -> None:
        self._end, self._tail = last_event, bytearray()
        self._seen = 0
        self._named = False

    def feed(self, data: bytes) -> bool:
        """Whether the stream is complete with these bytes."""
        self._tail += data
        behind = 0
        for blank in _BLANK.finditer(self._tail, max(self._seen - 3, 0)):
            behind = blank.end()
        if behind:
            ended = self._named or self._end.search(self._tail, 0, behind) is not None
            del self._tail[:behind]
            self._named = False
        else:
            ended = False
            self._shorten()
        self._seen = len(self._tail)
        return ended

    def _shorten(self) -> None:
        """Of a long unfinished event keep only whether it is the last one, and its end."""
        if len(self._tail) > _LONG_EVENT:
            self._named = self._named or self._end.search(self._tail) is not None
            self._tail[:-_LONG_PATTERN] = b"."  # lest what follows look like a line's beginning


def read_reply(form: UpstreamForm, body: Json) -> UpstreamReply:
    """A reply that came whole; without choices where it is none that is known."""
    error = body.get("error")
    try:
        reply = form.reply(body)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RequestError):
        reply = NO_REPLY
    return replace(reply, error=error) if error else reply


def gathered(form: UpstreamForm, events: Sequence[Json]) -> Json | None:
    """The whole reply, in the form in which the API gives it unstreamed; None where there is none.

    An error within the stream is in it as `error`.
    """
    try:
        whole = form.gather(events)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return None
    error = next((e["error"] for e in events if e.get("error")), None)
    if error is None:
        error = next((e for e in events if e.get("type", e.get("object")) == "error"), None)
    return whole if error is None else (whole or {}) | {"error": error}


Headers = Sequence[tuple[bytes, bytes]]


def sent_credentials(headers: Headers, query: str, own: Iterable[str]) -> set[str]:
    """The secrets that a request came with, or is sent on with.

    Args:
        query: of its address, behind the question mark.
        own: keys and logins of the proxy's own.
    """
    secrets = {part for secret in own for part in credentials(secret)}
    for name, value in headers:
        text = value.decode("utf-8", "replace")
        if name.lower() == b"cookie":
            secrets |= {pair.partition("=")[2].strip() for pair in text.split(";")} | {text}
        elif is_secret_name(name.decode("latin-1")):
            secrets |= credentials(text)
    pairs = parse_qsl(query, errors="replace")
    return secrets | {value for name, value in pairs if grants_access(name)}


def given_cookies(headers: Headers) -> set[str]:
    """The values of the cookies that a reply sets."""
    lines = [value.decode("utf-8", "replace") for name, value in headers if name.lower() == b"set-cookie"]
    return {line.partition(";")[0].partition("=")[2].strip() for line in lines} - {""}
