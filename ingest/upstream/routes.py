"""Record-only mode, request by request: each passes to the upstream byte for byte, and is recorded beside.

`UpstreamRoutes.answer` is the whole way of one; the reply's way back is `ForwardedResponse`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import Request, Response
from yarl import URL

from rollbook.edge.bodies import BodyBudget, decoded
from rollbook.edge.bounds import check_depth, check_weight, run_by_size
from rollbook.edge.keys import Caller, Keys
from rollbook.edge.requests import ClientGone, ClientWatch, RequestSlots
from rollbook.edge.server_sent_events import json_of
from rollbook.ingest.endpoints.api import AgentApi
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.fields import check_recordable
from rollbook.ingest.recording.redact import changes_conversation
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.routes.resolver import Address, RequestResolver
from rollbook.ingest.trajectories.identity import Identity
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.model_call import OUTSIDE_BYTES, ModelCall, check_outside
from rollbook.ingest.turns.planning import retry_count
from rollbook.ingest.upstream.forwarded_call import ForwardedCall
from rollbook.ingest.upstream.forwarded_response import ForwardedResponse, sent_credentials
from rollbook.ingest.upstream.paths import Paths, Upstream, canonical_path, response_named
from rollbook.ingest.upstream.recorder import UpstreamRecorder
from rollbook.store.errors import EngineError, LimitError, RequestError, StoreError
from rollbook.store.events import QUARANTINE, Json
from rollbook.store.redaction import secrets_in, shown

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
