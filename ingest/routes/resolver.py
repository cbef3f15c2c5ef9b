"""Finds the caller and the trajectory of every request that the guard let in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request

from rollbook.edge.bounds import run_by_size, run_in_thread
from rollbook.edge.guard import caller_of
from rollbook.edge.keys import Caller
from rollbook.edge.requests import until_gone
from rollbook.ingest.admission.gate import Gate
from rollbook.ingest.cluster.siblings import RequestRouter
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.settings import ServeSettings
from rollbook.ingest.tokens.message_form import chain_all
from rollbook.ingest.trajectories.identity import Identity, check_said_once, identify, split_path
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.model_call import OUTSIDE_BYTES, check_outside
from rollbook.store.errors import RequestError
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class Address:
    """Where a request was sent, and by whom.

    Attributes:
        fields: what the path says of the trajectory.
        path: the endpoint's.
    """

    fields: Json
    path: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class RequestResolver:
    """Finds the trajectory that a request belongs to."""

    recorder: Recorder
    settings: ServeSettings
    gate: Gate | None = None
    """Holds new trajectories while an online training could not use them in time."""
    others: RequestRouter | None = None
    """Who else may own what a request is about, if there are any."""

    def address(self, request: Request) -> Address:
        """Where a request was sent, and by whom.

        Raises:
            RequestError: 404, the path holds no id; 400, it or the headers say two things.
        """
        check_said_once(request.headers.raw, self.settings.naming)
        raw = request.scope.get("raw_path") or request.url.path.encode()
        named, endpoint = split_path(raw.decode("latin-1").partition("?")[0])
        return Address(named, endpoint, caller_of(request))

    def identity(self, address: Address, request: Request, body: Json) -> Identity:
        """Which trajectory a request names. A hint's name has no secrets: a session's id may be anything.

        Raises:
            RequestError: 400, it names two, or its headers cannot be read.
        """
        naming = self.settings.naming
        identity = identify(address.fields, request.headers, body, address.caller.key, naming)
        if identity.by != "hint" or identity.name is None:
            return identity
        return replace(identity, name=self.recorder.redactor.text(identity.name))

    async def ensure_local(
        self,
        request: Request,
        name: str | None,
        reply_ids: Iterable[str],
        raw: bytes,
        *,
        plain: bool = True,
        kept: bool = True,
    ) -> None:
        """See that a request is this process's, now that its body is read: see `Siblings`.

        Args:
            name: the trajectory that it names, if it does.
            reply_ids: the earlier replies that it refers to.

        Raises:
            ElsewhereError: it is another one's.
        """
        if self.others is None:
            return
        if name is not None:
            self.others.check_name(request, name, raw, plain=plain)
        else:
            await self.others.check_unnamed(request, [*reply_ids], raw, plain=plain, kept=kept)

    async def redacted(self, body: Json, size: int) -> Json:
        """A request of so many bytes without secrets. A large one is looked through in a thread."""
        if size <= OUTSIDE_BYTES:
            return await run_by_size(size, self.recorder.redactor.body, body)
        await run_in_thread(check_outside, body)
        return await run_in_thread(self.recorder.redactor.body, body)

    async def admit(
        self, name: str, wanted: OpenTrajectory, request: Request, reservation: contextlib.ExitStack
    ) -> None:
        """Wait until a new trajectory may begin.

        Args:
            request: the one that begins it, whose body was read.
            reservation: keeps room for it until it is closed: the trajectory has begun by then, or will not.

        Raises:
            RequestError: 503, it may not within the time that requests are held; 499, its client has left.
        """
        if self.gate is None or self.recorder.find(name) is not None:
            return
        gone = partial(until_gone, request.receive)
        if await self.gate.enter(name, wanted.group, wanted.split, gone):
            reservation.callback(self.gate.leave, name)

    async def trajectory(
        self, identity: Identity, messages: list[Json], size: int, by: str | None = None
    ) -> LiveTrajectory:
        """The trajectory a request belongs to: that of its name, a new one, or a quarantined one.

        Until the caller waits for something else it can be extended as it is, or recorded if it is new.

        Args:
            size: bytes of the request.
            by: the name of the key that opens it, if it is new.

        Raises:
            RequestError: 409, it is finished, or was opened otherwise than the request says.
            WriteFailedError: what is still to be written of it cannot be.
        """
        if identity.name is not None:
            await self.recorder.recall(identity.name)
            return self._named(identity, identity.name, by)
        hashes = await run_by_size(size, chain_all, messages)
        while True:
            live = self.recorder.unnamed(hashes, by)
            if not self.recorder.is_open(live):
                return live  # new
            if await self.recorder.recall(live.opened.name) is live and not live.finished:
                return live

    def _named(self, identity: Identity, name: str, by: str | None) -> LiveTrajectory:
        wanted = self.wanted(identity)
        live = self.recorder.find(name)
        if live is None:
            return self.recorder.draft(wanted, by)
        if live.finished:
            text = f"trajectory {name!r} is finished: open another for more turns"
            raise RequestError(409, "trajectory_finished", text)
        for field in ("group", "task", "split"):
            sent, opened = getattr(wanted, field), getattr(live.opened, field)
            if field in identity.fields and sent != opened:
                text = f"trajectory {name!r} was opened with {field} {opened!r}, not {sent!r}"
                raise RequestError(409, "trajectory_conflict", text)
        return live

    def wanted(self, identity: Identity) -> OpenTrajectory:
        """The trajectory that a request opens if there is none of its name."""
        return self._clean(identity).wanted()

    def label(self, live: LiveTrajectory, identity: Identity, by: str | None = None) -> Future[int] | None:
        """Note the labels of a request, which is recorded by now, if it gives any that are new."""
        return self.recorder.relabelled(live, self._clean(identity).labels, by)

    def _clean(self, identity: Identity) -> Identity:
        redacted = self.recorder.redactor.fields
        fields, labels = redacted(identity.fields), redacted(identity.labels)
        if fields is identity.fields and labels is identity.labels:
            return identity
        return replace(identity, fields=fields, labels=labels)
