"""Several engines behind one proxy: which of them gets a request, and which of them may get any.

A trajectory stays with its engine, which has its prefixes cached; a new one goes where the fewest run. An
engine that is being synced takes no new requests; one whose sync failed, or that cannot be reached, is out,
and what it was answering fails at once, so that it can be asked elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter

from rollbook.ingest.engines.engine import Activated, Engine, Generation, Heard, Prompt, Sampling, unheard
from rollbook.store.errors import EngineError, EngineHeldError, EngineLostError
from rollbook.store.events import Json, SyncFailed, SyncFinished, SyncStarted

OWN = "/engine"
"""Address of the engine in this process."""
PROBE_S = 1.0
"""How often an engine that went away is asked whether it is back."""
STICKY_KEPT = 65536
"""Trajectories whose engine is remembered."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine, and whether it may be asked.

    Attributes:
        url: its address, by which the log names it.
        version: what the last sync gave it.
        syncing: ids of syncs that began and have not ended.
        out: why it may not be asked, or None.
        lost: says why, when it goes out, to those who wait for its answers.
        synced: whether a trainer keeps its weights: it must have those of `version`.
        failed: whether its last sync failed: then only a whole one makes it usable again.
        connected: whether it was started, and not lost since.
    """

    url: str
    engine: Engine
    version: int | None = None
    running: int = 0
    syncing: set[str] = field(default_factory=set)
    out: str | None = None
    synced: bool = False
    failed: bool = False
    connected: bool = False
    requests: set[str] = field(default_factory=set)
    lost: asyncio.Future[str] | None = None

    @property
    def has_its_weights(self) -> bool:
        """Whether it names those that a trainer gave it, if one did: one that began anew has its first."""
        return not self.synced or self.version in (None, self.engine.policy_version())

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return self.out is None and not self.syncing

    def goes_out(self, why: str) -> None:
        """It may not be asked any more; whoever waits for it hears so."""
        self.out = self.out or why
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(self.out)

    def comes_back(self) -> None:
        """It may be asked again. Who waited for it when it went out has been told; others still wait."""
        if self.out is not None:
            self.out, self.lost = None, None


class Fleet:
    """Engines of one kind, as one engine.

    Args:
        engines: by address; the proxy's own engine as `/engine`.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.members = [Member(url.rstrip("/"), engine) for url, engine in engines.items()]
        first = self.members[0].engine
        self.name, self.policy = first.name, getattr(first, "policy", "actor")
        self.honoured = frozenset.intersection(*(m.engine.honoured for m in self.members))
        self.takes_images = all(m.engine.takes_images for m in self.members)
        self._changed = asyncio.Condition()
        self._of: OrderedDict[str, Member] = OrderedDict()
        self._probing: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self, activated: Activated) -> None:
        """Start all. One that cannot be reached is out until it can; that none can is an error.

        Raises:
            EngineError: none can be reached, or one is not what it should be.
        """
        self._activated = activated
        problems: list[EngineError] = []
        for member in self.members:
            try:
                await member.engine.start(activated)
                member.connected = True
            except EngineLostError as error:
                problems.append(error)
                self._away(member, str(error))
        if len(problems) == len(self.members):
            await self.close()
            raise problems[0]

    async def close(self) -> None:
        """Stop all."""
        for task in [*self._probing, *self._telling]:
            task.cancel()
        for member in self.members:
            await member.engine.close()

    async def ready(self) -> None:
        """Return once an engine takes requests."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(m.usable for m in self.members))
        usable = [m for m in self.members if m.usable]
        if len(usable) == 1:
            await usable[0].engine.ready()

    async def generate(self, prompt: Prompt, sampling: Sampling, heard: Heard = unheard) -> Generation:
        """Sample a completion.

        Raises:
            EngineHeldError: a sync of all began since `ready` returned.
            EngineLostError: the engine is gone, or may not be believed any more.
            EngineError: it refuses.
        """
        member = self._chosen(prompt.trajectory_id)
        if member.lost is None:
            member.lost = asyncio.get_running_loop().create_future()
        lost = member.lost
        member.running += 1
        member.requests.add(prompt.request_id)
        answer = asyncio.ensure_future(member.engine.generate(prompt, sampling, heard))
        try:
            both: set[asyncio.Future[Any]] = {answer, lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineLostError(f"engine {member.url}: {lost.result()}")
            return answer.result()
        except EngineLostError as error:
            if not lost.done():  # else all know that it was out, and it may be back by now
                self._away(member, str(error))
            raise
        finally:
            answer.cancel()
            member.running -= 1
            member.requests.discard(prompt.request_id)

    def _chosen(self, trajectory_id: str) -> Member:
        """The trajectory's engine, or that which answers the fewest."""
        held = self._of.get(trajectory_id)
        if held is not None and held.usable:
            self._of.move_to_end(trajectory_id)
            return held
        usable = [m for m in self.members if m.usable]
        if not usable:
            raise EngineHeldError("no engine takes requests now")
        member = min(usable, key=lambda m: m.running)
        if trajectory_id:
            self._of[trajectory_id] = member
            while len(self._of) > STICKY_KEPT:
                self._of.popitem(last=False)
        return member

    async def abort(self, request_id: str) -> None:
        """End a request where it runs."""
        for member in self.members:
            if request_id in member.requests:
                await member.engine.abort(request_id)

    def policy_version(self) -> int | None:
        """The oldest version that is served: what is sampled now is at least as new."""
        asked = [m for m in self.members if m.out is None] or self.members
        versions = [_version(member) for member in asked]
        return min((version for version in versions if version is not None), default=None)

    def failure(self) -> str | None:
        """Why none can answer, or None."""
        reasons = [m.engine.failure() or m.out for m in self.members]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    def states(self) -> list[Json]:
        """Each engine: its address, what runs in it, its version, and why it is not asked, if it is not."""
        return [
            {
                "url": member.url,
                "running": member.running,
                "policy_version": _version(member),
                "state": member.out or ("syncing" if member.syncing else "usable"),
            }
            for member in self.members
        ]

    def control(self) -> APIRouter | None:
        """The routes of an engine in this process."""
        return self.members[0].engine.control() if len(self.members) == 1 else None

    # What becomes of engines ------------------------------------------------------------------

    def remember(self, records: Sequence[SyncStarted | SyncFinished | SyncFailed]) -> None:
        """Take what the log said before this proxy began. An engine in this process began with it."""
        for record in records:
            if self.members[0].url != OWN:
                self.heard(record)
        for member in self.members:
            if member.usable and not member.has_its_weights:
                self._away(member, "it serves other weights than the last sync gave it")

    def heard(self, record: SyncStarted | SyncFinished | SyncFailed) -> None:
        """Take what the log says of a sync."""
        for member in self.members:
            if not _same(member.url, record.engine):
                continue
            member.synced = True
            if isinstance(record, SyncStarted):
                member.syncing.add(record.sync_id)
                continue
            if isinstance(record, SyncFinished):
                member.syncing.clear()  # earlier ones too: their trainer is gone
                member.failed = False
                member.version = None if member.url == OWN else record.policy_version
                if member.connected:
                    member.comes_back()
            else:
                member.failed = True
                member.syncing.discard(record.sync_id)
                text = f"the sync of version {record.policy_version} failed: {record.error}"
                member.goes_out(text + "; a whole sync makes it usable")
        self._tell()

    def _away(self, member: Member, why: str) -> None:
        if member.out is None:
            member.goes_out(why)
            member.connected = False
            task = asyncio.create_task(self._probe(member))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probe(self, member: Member) -> None:
        """Ask until it answers, and has the weights that a trainer gave it: a sync may be under way."""
        while True:
            await asyncio.sleep(PROBE_S)
            if member.out is None:
                return  # a sync brought it back
            member.connected = False
            try:
                await member.engine.close()
                await member.engine.start(self._activated)
            except EngineError:
                continue
            member.connected = True
            if member.failed:
                return  # only a sync can
            if member.has_its_weights:
                member.comes_back()
                self._tell()
                return

    def _tell(self) -> None:
        """Wake whoever waits for an engine."""

        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _version(member: Member) -> int | None:
    return member.engine.policy_version() if member.version is None else member.version


def _same(own: str, named: str) -> bool:
    """Whether the log's address of an engine is this one. The proxy's own is known by its path alone."""
    if own == OWN:
        return urlsplit(named).path.rstrip("/") == own
    one, other = urlsplit(own), urlsplit(named.rstrip("/"))
    local = {"localhost", "127.0.0.1", "::1"}
    hosts = {one.hostname, other.hostname}
    return one.port == other.port and (len(hosts) == 1 or hosts <= local) and one.path == other.path
