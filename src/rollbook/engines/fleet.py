"""Several engines behind one proxy: which engine gets a request, and which engines may get requests at all.

A trajectory stays with its engine, which has its prefixes cached; a new one goes where the fewest run. An
engine that is being synced takes no new requests; one whose sync failed, or that cannot be reached, is out,
and what it was answering fails at once, so that it can be asked elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cachetools import LRUCache
from fastapi import APIRouter

from rollbook.engines.engine import Activated, Engine, Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.engines.patience import end_now
from rollbook.engines.weights.log import OWN, same_address
from rollbook.store.errors import EngineHeldError, EngineLostError, RollbookError
from rollbook.store.events import Json, SyncFailed, SyncFinished, SyncStarted

PROBE_S = 1.0
"""Seconds between two tries to reach an engine that is out."""
STICKY_KEPT = 65536
"""How many trajectories stay assigned to their engine; the least recently used are forgotten first."""


class Fleet:
    """Engines of one kind, as one engine.

    Args:
        engines: by address; the proxy's own engine as `/engine`.
        patience_s: how long an engine whose weights differ from those its trainer sent waits for
            a sync. After that it is used with the weights it has.
    """

    def __init__(self, engines: Mapping[str, VersionedEngine], patience_s: float = 110.0) -> None:
        self._patience_s = patience_s
        self.members = [Member(url.rstrip("/"), engine) for url, engine in engines.items()]
        first = self.members[0].engine
        self.name, self.policy = first.name, getattr(first, "policy", "actor")
        self.honoured = frozenset.intersection(*(m.engine.honoured for m in self.members))
        self.takes_images = all(m.engine.takes_images for m in self.members)
        self._changed = asyncio.Condition()
        self._assigned: LRUCache[str, Member] = LRUCache(STICKY_KEPT)
        self._probing: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._verifying: set[asyncio.Task[None]] = set()

    async def start(self, activated: Activated) -> None:
        """Start all. An engine that cannot be reached stays out until it can be; it is an error if
        none can.

        Raises:
            EngineError: none can be reached, or one is not what it should be.
        """
        self._activated = activated
        problems: list[EngineLostError] = []
        try:
            for member in self.members:
                member.out, member.verifying = None, False
                try:
                    await member.engine.start(activated)
                    member.connected = True
                except EngineLostError as error:
                    problems.append(error)
                    self._away(member, str(error))
            if len(problems) == len(self.members):
                raise problems[0]
        except BaseException:
            await self.close()
            raise

    async def look(self) -> list[tuple[str, Json]]:
        """Connect to all once, before anything is recorded.

        Returns:
            (address, what /model_info says) of each server.

        Raises:
            EngineError, VersionError: none can be reached, or one is not what it should be.
        """
        answers: list[tuple[str, Json]] = []
        problems: list[EngineLostError] = []
        for member in self.members:
            try:
                answers += await member.engine.look()
            except EngineLostError as error:
                problems.append(error)
        if len(problems) == len(self.members):
            raise problems[0]
        return answers

    async def close(self) -> None:
        """Stop all."""
        for task in [*self._probing, *self._telling, *self._verifying]:
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

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """Sample a completion.

        Raises:
            EngineHeldError: a sync of all began since `ready` returned.
            EngineLostError: the engine is gone, or can no longer be trusted.
            EngineError: it refuses.
        """
        member = self._chosen(prompt.trajectory_id)
        member.running += 1
        asked = member.requests[prompt.request_id] = _Asked(asyncio.timeout(None))
        try:
            async with asked.patience:
                generation = await member.engine.generate(prompt, sampling, on_tokens)
            if member.engine.doubtful():
                self._look(member)
            return generation
        except TimeoutError:
            if asked.lost is None:
                raise
            raise EngineLostError(f"engine {member.url}: {asked.lost}") from None
        except EngineLostError:
            if asked.lost is None:  # else it was taken out already, and may be back by now
                self._look(member)  # other requests that run there may still succeed
            raise
        finally:
            member.running -= 1
            del member.requests[prompt.request_id]

    def _chosen(self, trajectory_id: str) -> Member:
        """The trajectory's engine, or the one that answers the fewest requests."""
        held = self._assigned.get(trajectory_id)
        if held is not None and held.usable:
            return held
        usable = [m for m in self.members if m.usable]
        if not usable:
            raise EngineHeldError("no engine takes requests now")
        member = min(usable, key=lambda m: m.running)
        if trajectory_id:
            self._assigned[trajectory_id] = member
        return member

    def forget(self, trajectory_id: str) -> None:
        """Forget the engine of a trajectory that is finished."""
        self._assigned.pop(trajectory_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request where it runs."""
        for member in self.members:
            if request_id in member.requests:
                await member.engine.abort(request_id)

    def policy_version(self) -> int | None:
        """The oldest version that is served; tokens sampled from now on are at least as new."""
        members = [m for m in self.members if m.out is None] or self.members
        return min((m.serves for m in members if m.serves is not None), default=None)

    def failure(self) -> str | None:
        """Why no engine can answer, or None."""
        reasons = [m.engine.failure() or m.out for m in self.members]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    def states(self) -> list[Json]:
        """Each engine: its address, its running requests, its version or why it has none, what it
        waits for."""
        return [
            {
                "url": member.url,
                "running": member.running,
                "policy_version": member.serves,
                "unverified": member.engine.unverified(),
                "state": member.state,
            }
            for member in self.members
        ]

    def control(self) -> APIRouter | None:
        """The routes of an engine in this process."""
        return self.members[0].engine.control() if len(self.members) == 1 else None

    # What becomes of engines ------------------------------------------------------------------

    def remember(
        self, records: Sequence[SyncStarted | SyncFinished | SyncFailed], *, trained: bool = False
    ) -> None:
        """Apply the syncs that the log holds from before this proxy began.

        An engine in this process began with the proxy, and still has its first weights: while a
        training goes on it waits for its sync.

        Args:
            trained: an online training goes on.
        """
        for record in records:
            if self.members[0].url != OWN:
                self._take(record, earlier=True)
            elif trained and isinstance(record, SyncFinished) and same_address(OWN, record.engine):
                self.members[0].trainer_keeps_weights = True
                self.members[0].version = record.policy_version
        for member in self.members:
            if member.usable and not member.has_its_weights:
                self._waits_for_sync(member)
        self._notify()

    def on_sync(self, record: SyncStarted | SyncFinished | SyncFailed) -> None:
        """Apply a recorded sync."""
        self._take(record, earlier=False)
        self._notify()

    def _take(self, record: SyncStarted | SyncFinished | SyncFailed, *, earlier: bool) -> None:
        """Apply a recorded sync.

        Args:
            earlier: the sync was before this proxy began, and the engine has reported its weights since.
        """
        for member in self.members:
            if same_address(member.url, record.engine):
                self._synced(member, record, earlier)
            elif isinstance(record, SyncFinished) and not earlier and member.engine.unverified():
                self._look(member)  # it may be a router in front of that one

    def _synced(self, member: Member, record: SyncStarted | SyncFinished | SyncFailed, earlier: bool) -> None:
        member.trainer_keeps_weights = True
        if isinstance(record, SyncStarted):
            member.syncing.add(record.sync_id)
        elif isinstance(record, SyncFinished):
            member.syncing.clear()  # earlier ones too: their trainer is gone
            member.sync_failed = False
            member.version = None if member.url == OWN else record.policy_version
            if not earlier:
                member.engine.synced(record.policy_version)
            if member.connected:
                member.comes_back()
        else:
            member.sync_failed = True
            member.syncing.discard(record.sync_id)
            text = f"the sync of version {record.policy_version} failed: {record.error}"
            member.goes_out(f"waits for a whole sync, which makes it usable again: {text}")

    def _look(self, member: Member) -> None:
        """Find out whether an engine answers and which weights it has; until then it gets no new requests."""
        if member.verifying or member.out is not None:
            return
        member.verifying = True
        task = asyncio.create_task(self._looked(member))
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)

    async def _looked(self, member: Member) -> None:
        try:
            await member.engine.verify()
        except RollbookError as error:
            self._away(member, str(error))
        else:
            if not member.has_its_weights and not member.syncing and member.out is None:
                self._waits_for_sync(member)
        finally:
            member.verifying = False
            self._notify()

    def _away(self, member: Member, why: str) -> None:
        """Mark an engine that cannot be reached or used."""
        member.connected = False
        self._goes(member, f"waits for it to answer: {why}")

    def _waits_for_sync(self, member: Member) -> None:
        text = (
            f"waits for a sync: it has other weights than version {member.version}, which the last one gave"
        )
        self._goes(member, text)

    def _goes(self, member: Member, why: str) -> None:
        """Take an engine out, and probe it until it can be used."""
        probed = member.out is not None
        member.goes_out(why)
        if not probed:
            task = asyncio.create_task(self._probe(member))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probe(self, member: Member) -> None:
        """Probe until the engine answers with its trainer's weights; a sync may be under way."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            await asyncio.sleep(PROBE_S)
            if member.out is None:
                return  # a sync brought it back
            if not await self._reached(member):
                since = None
                continue
            if member.sync_failed:
                return  # only a sync can
            since = loop.time() if since is None else since
            waited = loop.time() - since >= self._patience_s
            if member.has_its_weights or waited:
                if waited:
                    # Its trainer is gone: tokens are recorded with the version that the engine really has.
                    member.trainer_keeps_weights, member.version = False, None
                member.comes_back()
                self._notify()
                return
            if member.out is not None:
                self._waits_for_sync(member)

    async def _reached(self, member: Member) -> bool:
        """Whether the engine answers and can be used; its weights are identified on the way."""
        try:
            if member.connected:
                await member.engine.verify()
            else:
                await member.engine.close()
                await member.engine.start(self._activated)
        except RollbookError as error:
            member.connected = False
            if not member.sync_failed and member.out is not None:
                member.out = f"waits for it to answer: {error}"
            return False
        member.connected = True
        return True

    def _notify(self) -> None:
        """Wake all requests that wait for an engine."""

        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


class VersionedEngine(Engine, Protocol):
    """An engine that knows, or can find out, which version its weights are."""

    async def verify(self) -> None:
        """Identify the version of its weights; where that fails, `unverified` says why.

        Raises:
            EngineLostError: it cannot be reached.
        """

    async def look(self) -> list[tuple[str, Json]]:
        """Connect once and disconnect, before anything is recorded.

        Returns:
            (address, what /model_info says) of each server.

        Raises:
            EngineError, VersionError: it cannot be used, as `start` would find out.
        """

    def held(self) -> tuple[int, str] | None:
        """(version, weights digest) of weights in this process, None where a server has them."""

    def unverified(self) -> str | None:
        """Why its tokens have no version now, or None."""

    def doubtful(self) -> bool:
        """Whether `verify` is due, since its last answer came from weights of unknown version."""

    def synced(self, version: int) -> None:
        """Note the version that a sync gave it, verified."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that an engine answers, and why it lost it, if it did."""

    patience: asyncio.Timeout
    lost: str | None = None

    def lose(self, why: str) -> None:
        """End the wait for its answer."""
        if self.lost is None:
            self.lost = why
            end_now(self.patience)


@dataclass(slots=True, eq=False)
class Member:
    """One engine, and whether it takes requests.

    Attributes:
        url: its address, by which the log names it.
        version: what the last sync gave it.
        syncing: ids of syncs that began and have not ended.
        out: why it may not be asked now, or None; what is waited for comes first.
        verifying: whether it is being verified: that it answers, and which weights it has.
        trainer_keeps_weights: whether a trainer syncs it, so that it must have the weights of `version`.
        sync_failed: whether its last sync failed; then only a complete sync makes it usable again.
        connected: whether it was started and has been reachable since.
    """

    url: str
    engine: VersionedEngine
    version: int | None = None
    running: int = 0
    syncing: set[str] = field(default_factory=set)
    out: str | None = None
    verifying: bool = False
    trainer_keeps_weights: bool = False
    sync_failed: bool = False
    connected: bool = False
    requests: dict[str, _Asked] = field(default_factory=dict)

    @property
    def has_its_weights(self) -> bool:
        """Whether it has the weights that its trainer sent, if one did; after a restart it has others."""
        return not self.trainer_keeps_weights or self.version in (None, self.engine.policy_version())

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return self.out is None and not self.syncing and not self.verifying

    @property
    def serves(self) -> int | None:
        """The version of its tokens now, or None where they have none."""
        if self.engine.unverified() is not None:
            return None
        return self.engine.policy_version() if self.version is None else self.version

    @property
    def state(self) -> str:
        """What it waits for before it takes requests, or that it takes them."""
        if self.out is not None:
            return self.out
        if self.syncing:
            return "syncing"
        return "finding out which weights it has" if self.verifying else "usable"

    def goes_out(self, why: str) -> None:
        """Take it out of use; requests that wait for it fail."""
        self.out = why
        for asked in self.requests.values():
            asked.lose(why)

    def comes_back(self) -> None:
        """Put it back into use. Requests that waited when it went out have failed; later ones still wait."""
        if self.out is not None:
            self.out = None
