"""A policy's weights according to the log: which names, checksums, paths and digests belong to
which version."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rollbook.engines.model_files import is_sharded
from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import OutsideError
from rollbook.store.events import (
    CheckpointWritten,
    Event,
    Json,
    PolicyActivated,
    PolicyPublished,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.fold.versions import BINDING, Origin, VersionDigests
from rollbook.store.log.tail import Filter

KINDS = BINDING | {SyncStarted.KIND, SyncFinished.KIND, SyncFailed.KIND}
"""Kinds of events that it is folded from."""
OWN = "/engine"
"""Address of the engine in this process."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Weights that an engine was seen to hold; `held`: how, as in `policy.activated`."""

    version: int
    weights_digest: str
    path: str
    held: Json | None = None


class WeightLog:
    """Folds one policy's weights in one run from the log, and reads on at each `refresh`.

    Args:
        known: events that were read already, and `start`, the cut that they were read up to.
    """

    def __init__(
        self, store: Store, run: str, policy: str, known: Iterable[Event] = (), start: Cut | None = None
    ) -> None:
        self.store, self.run, self.policy = store, run, policy
        self.begun = 0
        """Syncs that began so far: weights move only behind one."""
        self.changes = 0
        """Rises with each thing that an engine could be compared with, and was not before."""
        self._digests = VersionDigests()
        self._names: dict[str, int] = {}
        self._held: dict[str, Verified] = {}
        self._paths: dict[int, str] = {}
        self._given: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._reading = threading.Lock()
        for event in known:
            self._take(event)
        self._tail = store.tail(start or {}, Filter(KINDS, run=run))

    def refresh(self) -> None:
        """Read what has become durable since. Safe in any thread; it reads files."""
        with self._reading:
            for event in self._tail.poll():
                self._take(event)

    def _take(self, event: Event) -> None:
        record = event.record
        if getattr(record, "policy", None) != self.policy:
            return
        self._digests.add(event)
        match record:
            case PolicyActivated():
                self._activated(record)
            case PolicyPublished() | CheckpointWritten():
                self.changes += self._paths.get(record.policy_version) != record.path
                self._paths[record.policy_version] = record.path
            case SyncStarted():
                self.begun += 1
                self._open[record.sync_id] = record.engine
            case SyncFinished() | SyncFailed():
                self._open.pop(record.sync_id, None)
                if isinstance(record, SyncFinished):  # earlier ones too: their trainer is gone
                    self._open = {i: e for i, e in self._open.items() if not same_address(e, record.engine)}

    def _activated(self, record: PolicyActivated) -> None:
        if record.weight_name:
            self._names[record.weight_name] = record.policy_version
            self._given[record.engine] = record.policy_version
        if record.checksums and record.checksums not in self._held:
            what = (record.policy_version, record.weights_digest, record.path)
            self._held[record.checksums] = Verified(*what, record.held)
            self.changes += 1

    # What it knows ----------------------------------------------------------------------------

    def version_of(self, name: str) -> int | None:
        """The version that the log has bound a name of weights to."""
        return self._names.get(name)

    def holder_of(self, checksums: str) -> Verified | None:
        """The version that an engine with these checksums (`ranks_digest`) holds, if one was
        verified to before."""
        return self._held.get(checksums)

    def under_way(self, url: str) -> bool:
        """Whether a sync of the engine began and has not ended."""
        return any(same_address(url, engine) for engine in self._open.values())

    def likely(self, url: str) -> list[Path]:
        """Directories of weights that the engine may hold: the last one it was given, then the newest one.

        None with shards, which no engine is given.
        """
        versions_given = [version for engine, version in self._given.items() if same_address(url, engine)]
        versions = [*versions_given[-1:], *sorted(self._paths, reverse=True)[:1]]
        named = dict.fromkeys(self._paths[v] for v in versions if self._paths.get(v))
        paths = []
        for name in named:
            with contextlib.suppress(OutsideError):
                paths.append(self.store.folder(name))
        return [path for path in paths if path.is_dir() and not is_sharded(path)]

    def own(self, origin: Origin | None) -> int | None:
        """Which of the policy's versions a model directory is, by the log up to now; None: none of them."""
        self.refresh()
        return self._digests.own(self.run, self.policy, origin)

    @property
    def trees(self) -> bool:
        """Whether the policy's weights are digested by blocks (`store.digest`), by the log up to now."""
        self.refresh()
        return self._digests.trees(self.run, self.policy)

    def check(self, version: int, digest: str, what: str) -> None:
        """Check that weights may count as the version.

        Raises:
            VersionError: the log has bound it to others.
        """
        self._digests.check(self.run, self.policy, version, digest, what)


def same_address(own: str, named: str) -> bool:
    """Whether the log's address of an engine is this one. The proxy's own is known by its path alone."""
    if own == OWN:
        return urlsplit(named).path.rstrip("/") == own
    own_url, named_url = urlsplit(own), urlsplit(named.rstrip("/"))
    local = {"localhost", "127.0.0.1", "::1"}
    hosts = {own_url.hostname, named_url.hostname}
    return (
        own_url.port == named_url.port
        and (len(hosts) == 1 or hosts <= local)
        and own_url.path == named_url.path
    )
