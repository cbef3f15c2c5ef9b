"""Record-only mode, request by request: each passes to the upstream byte for byte, and is recorded beside.

`UpstreamRoutes.answer` is the whole way of one; the reply's way back is `ForwardedResponse`.

The reply of an upstream: passes every byte to the client as it comes, and keeps a copy for the log.

The end of a stream is found without parsing events as `edge.server_sent_events` does: an event of
any length passes, and of a long one only whether it is the last is held.

The secrets of the request and the reply are known, so that a recorded error of the upstream holds
none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote

import aiohttp
import orjson
from fastapi import Request, Response
from yarl import URL

from rollbook.edge.bodies import BodyBudget, codings, decoded
from rollbook.edge.bounds import LARGE_BYTES, check_depth, check_weight, run_by_size, run_in_thread
from rollbook.edge.forwarding import end_to_end
from rollbook.edge.keys import Caller, Keys
from rollbook.edge.requests import ClientGone, ClientWatch, RequestSlots
from rollbook.edge.server_sent_events import events_of, json_of
from rollbook.ingest.endpoints.api import AgentApi, UpstreamForm
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.endpoints.upstream_reply import MOST_CHOICES, NO_REPLY, UpstreamReply
from rollbook.ingest.fields import check_recordable
from rollbook.ingest.recording.redact import Redactor, changes_conversation
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.routes.resolver import Address, RequestResolver
from rollbook.ingest.trajectories.identity import Identity
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.model_call import OUTSIDE_BYTES, ModelCall, check_outside
from rollbook.ingest.turns.planning import retry_count
from rollbook.ingest.upstream.paths import Paths, Upstream, canonical_path, response_named
from rollbook.ingest.upstream.recorder import ForwardedCall, ReplyCopy, UpstreamRecorder
from rollbook.store.errors import EngineError, LimitError, RequestError, StoreError
from rollbook.store.events import QUARANTINE, Json
from rollbook.store.redaction import credentials, is_secret_name, secrets_in, shown
from rollbook.store.redaction.text import grants_access

PATIENCE_S = 2.0
"""Longest wait of a request for what its trajectory was to have on disk; then it passes unrecorded."""


@dataclass(slots=True, eq=False)
class UpstreamRoutes:
    """Passes requests on and records those that ask for completions."""

    upstream: Upstream
    resolver: RequestResolver
    room: BodyBudget
    recording: UpstreamRecorder
    keys: Keys
    paths: Paths | None = None
    """Those that pass; None: all."""
    session: aiohttp.ClientSession | None = None
    slots: RequestSlots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = RequestSlots(self.resolver.settings.max_running)

    async def answer(self, request: Request) -> Response:
        """Forward a request; the reply is the upstream's."""
        address, named = self.resolver.address(request), None
        if self.paths is not None:
            self.paths.check(request.method, address.path)
            named = response_named(request.method, canonical_path(address.path))
            if self.resolver.others is None:
                self._check_response(address, request, named)
        self.slots.check()
        # A request takes a slot once its body is there: a slow sender must not keep others out.
        async with self.room.body(request) as raw:
            if named is not None and self.resolver.others is not None:
                await self._stay(address, request, named, raw)
            with self.slots.taken_by_one():
                return await self._answered(request, address, raw)

    async def _stay(self, address: Address, request: Request, named: str, raw: bytes) -> None:
        """See that a request about a response is this worker's, of several, and that its client may see it.

        Raises:
            ElsewhereError: another worker or proxy knows the response.
            RequestError: 404, it is another's.
        """
        identity = self.resolver.identity(address, request, {})
        await self.resolver.ensure_local(request, identity.name, [named], raw, plain=False, kept=False)
        self._check_response(address, request, named)

    async def _answered(self, request: Request, address: Address, raw: bytes) -> Response:
        api = APIS.get(canonical_path(address.path)) if request.method == "POST" else None
        forwarded = None
        if api is None:
            self.recording.metrics.passed.labels(request.method).inc()
        else:
            forwarded, raw = await self._asked(request, api, address, raw)
            if forwarded is not None:
                await self._begin(forwarded)
        headers = _own_headers(api, forwarded)
        return await self._passed(request, address.path, raw, forwarded, headers)

    # To the upstream --------------------------------------------------------------------------

    async def _passed(
        self,
        request: Request,
        path: str,
        raw: bytes,
        forwarded: ForwardedCall | None,
        headers: dict[str, str],
    ) -> Response:
        """The reply, once it begins.

        Args:
            headers: of ours, for the reply.
        """
        watch = ClientWatch(request.receive)
        try:
            reply = await watch.race(self._send(request, path, raw, plain=forwarded is not None))
        except BaseException as error:
            watch.close()
            why = _failure(error)
            if forwarded is not None:
                await self._broken_off(forwarded, why)
            if isinstance(error, ClientGone):
                self.slots.release()
                return Response(status_code=499)  # the client has gone
            if isinstance(error, aiohttp.ClientError | TimeoutError | OSError | ValueError):
                raise EngineError(f"{self.upstream.url} cannot be reached: {why}") from error
            raise
        if forwarded is not None:
            forwarded.replying()
        secrets = partial(self._secrets, request, raw)
        return ForwardedResponse(
            reply, self.recording, forwarded, watch, headers, self.slots.release, secrets
        )

    def _secrets(self, request: Request, raw: bytes) -> set[str]:
        """The secrets of the request, for the redaction of a recorded error."""
        query = request.scope.get("query_string", b"").decode("latin-1")
        secrets = sent_credentials(request.headers.raw, query, self.upstream.secrets)
        with contextlib.suppress(RequestError):
            encoding = request.headers.get("content-encoding", "")
            sent = json_of(decoded(raw, encoding, self.resolver.settings.max_body_bytes))
            secrets |= secrets_in(sent) if isinstance(sent, dict) else set()
        return secrets

    async def _send(self, request: Request, path: str, raw: bytes, *, plain: bool) -> aiohttp.ClientResponse:
        assert self.session is not None
        own_keys = self.keys.configured
        headers = self.upstream.headers(request.headers.raw, path, own_keys=own_keys, plain=plain)
        query = request.scope.get("query_string", b"").decode("latin-1")
        target = URL(self.upstream.target(path, query), encoded=True)
        return await self.session.request(
            request.method, target, data=raw or None, headers=headers, allow_redirects=False
        )

    async def _broken_off(self, forwarded: ForwardedCall, why: str) -> None:
        forwarded.replying()
        try:
            self.recording.failed(forwarded, f"the upstream gave no reply: {why}")
            await self.recording.durable(forwarded, delivered=False)
        finally:
            forwarded.left()

    # Into the log -----------------------------------------------------------------------------

    async def _begin(self, forwarded: ForwardedCall) -> None:
        """Begin to forward a recorded request, or refuse it where it must be durable first and is not."""
        forwarded.begin()
        try:
            await self.recording.kept(forwarded)
        except BaseException:
            forwarded.refused()
            raise

    async def _asked(
        self, request: Request, api: AgentApi, address: Address, raw: bytes
    ) -> tuple[ForwardedCall | None, bytes]:
        """(the request as recorded, or None; the bytes to pass on)

        Raises:
            RequestError: it names no trajectory that it can belong to, or goes on from another's response, or
                cannot be recorded where that is refused.
        """
        try:
            plain = await self.room.decoded(raw, request.headers.get("content-encoding", ""))
            sent, body = await run_by_size(len(plain), self._read, plain)
        except Exception as error:
            if isinstance(error, LimitError):
                self.recording.metrics.refused(error.code)
            self.recording.unrecordable(1, f"a request cannot be read: {error!r}")
            return None, raw
        caller, identity = address.caller, self.resolver.identity(address, request, body)
        refers = () if api.ids is None else api.ids.in_body(body)
        await self.resolver.ensure_local(request, identity.name, refers, raw, plain=False)
        if self.paths is not None and api.ids is not None:
            for named in api.ids.in_body(body):
                self._check_response(address, request, named)
        try:
            async with asyncio.timeout(PATIENCE_S):
                known = await self._known(api, identity, body, caller)
            call = await self._call(api, body, known, len(plain))
            if call is None:
                return None, raw
            async with asyncio.timeout(PATIENCE_S):
                live = await self._live(identity, known, call, len(plain), caller)
        except (StoreError, OSError, TimeoutError) as error:
            logging.getLogger(__name__).info("rollbook: a trajectory cannot be read: %r", error)
            self.recording.unrecordable(1)
            return None, raw
        arrival = Arrival.kept(api.path, raw, sent, body, retry_count(request), caller.name)
        forwarded = self._recorded(api, live, call, arrival, redacted=changes_conversation(sent, body))
        if self.upstream.ask and api.upstream.takes_fields:
            raw = orjson.dumps(self.upstream.ask | sent)
        return forwarded, raw

    def _read(self, plain: bytes) -> tuple[Json, Json]:
        """(a body, the same as it may be recorded)

        Raises:
            RequestError: it is no JSON object that could be recorded.
        """
        check_weight(plain)
        sent = json_of(plain)
        if not isinstance(sent, dict):
            raise RequestError(400, "bad_json", "a request's body is no JSON object")
        check_depth(sent)
        if len(plain) > OUTSIDE_BYTES:
            check_outside(sent)
        body = self.resolver.recorder.redactor.body(sent)
        check_recordable(body)
        return sent, body

    async def _known(
        self, api: AgentApi, identity: Identity, body: Json, caller: Caller
    ) -> LiveTrajectory | None:
        """The trajectory that a request belongs to, if it is there: by its name, or by what it refers to.

        Raises:
            RequestError: 409, another proxy writes it.
        """
        recorder = self.recording.recorder
        if identity.name is not None:
            await recorder.recall(identity.name)
            return recorder.find(identity.name)
        known = self.recording.referred(api, body, caller)
        return None if known is None else await recorder.recall(known.opened.name)

    async def _call(
        self, api: AgentApi, body: Json, known: LiveTrajectory | None, size: int
    ) -> ModelCall | None:
        """What is asked; None: it cannot be read."""
        contents = None if known is None else known.contents
        try:
            return await run_by_size(size, api.upstream.read, body, contents)
        except Exception as error:
            self.recording.unrecordable(1, f"a request cannot be read: {error!r}")
            return None

    async def _live(
        self, identity: Identity, known: LiveTrajectory | None, call: ModelCall, size: int, caller: Caller
    ) -> LiveTrajectory:
        """The trajectory that a request belongs to, to be used at once.

        Raises:
            RequestError: it names one that it cannot belong to.
        """
        if identity.name is None and known is not None:
            again = await self.recording.recorder.recall(known.opened.name)
            if again is known and not known.finished:
                return known
        return await self.resolver.trajectory(identity, call.messages, size, caller.name)

    def _recorded(
        self, api: AgentApi, live: LiveTrajectory, call: ModelCall, arrival: Arrival, *, redacted: bool
    ) -> ForwardedCall | None:
        """The request as recorded; None: it could not be.

        Raises:
            RequestError: it may not pass unrecorded.
        """
        try:
            return self.recording.asked(api, live, call, arrival, redacted=redacted)
        except RequestError:
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("rollbook: a request cannot be recorded")
            self.recording.unrecordable(1, f"a request cannot be recorded: {error!r}")
            return None

    def _check_response(self, address: Address, request: Request, response_id: Any) -> None:
        """Refuse another's response: behind the engine's key they all lie together.

        Raises:
            RequestError: 404, none of that id passed here in the trajectory that is named, or by this key.
        """
        if not isinstance(response_id, str):
            return
        owner, identity = self.recording.owner(response_id), self.resolver.identity(address, request, {})
        if owner is None or not owner.lets(address.caller, identity.name if identity.explicit else None):
            text = f"no response {response_id[:200]!r} passed here in this trajectory or by this key"
            raise RequestError(404, "unknown_response", text)


def _own_headers(api: AgentApi | None, forwarded: ForwardedCall | None) -> dict[str, str]:
    """What a reply says beside the upstream's own headers."""
    if forwarded is None:
        return {} if api is None else {"x-rollbook-unrecorded": "1"}
    opened = forwarded.live.opened
    headers = {
        "x-rollbook-turn-id": ",".join(r.turn_id for r in forwarded.requested),
        "x-rollbook-trajectory-id": opened.trajectory_id,
    }
    return headers | ({"x-rollbook-quarantined": quote(opened.name)} if opened.split == QUARANTINE else {})


def _failure(error: BaseException) -> str:
    """An error without the address, whose query may hold a key."""
    if isinstance(error, ClientGone):
        return "the client left before it began"
    if isinstance(error, aiohttp.InvalidURL):
        return "its address is no URL"
    return shown(repr(error))


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
