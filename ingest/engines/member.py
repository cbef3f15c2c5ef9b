"""One engine of a fleet: what is known of its weights, and whether it takes requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from rollbook.ingest.engines.engine import Engine
from rollbook.store.events import Json


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
class Member:
    """One engine, and whether it takes requests.

    Attributes:
        url: its address, by which the log names it.
        version: what the last sync gave it.
        syncing: ids of syncs that began and have not ended.
        out: why it may not be asked now, or None; what is waited for comes first.
        verifying: whether it is being verified: that it answers, and which weights it has.
        lost: resolved with the reason when it is taken out, for requests that wait for it.
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
    requests: set[str] = field(default_factory=set)
    lost: asyncio.Future[str] | None = None

    @property
    def has_its_weights(self) -> bool:
        """Whether it has the weights that a trainer gave it, if one did; after a restart it has others."""
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
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(why)

    def comes_back(self) -> None:
        """Put it back into use. Requests that waited when it went out have failed; later ones still wait."""
        if self.out is not None:
            self.out, self.lost = None, None
