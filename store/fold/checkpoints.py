"""Which checkpoints of a run exist, and which weights are in use outside of a training. Pure.

A checkpoint exists from when it was written until it is removed. Weights are in use if an engine
holds them or a sync is sending them to one.

Each process of a lane begins with `run.opened`, and what earlier processes of its lane recorded
about engines no longer counts: a trainer syncs the engines it knows again, and a proxy queries
its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath

from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    Event,
    PolicyActivated,
    RunOpened,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)


def held_and_removed(events: Iterable[Event]) -> tuple[list[CheckpointWritten], list[CheckpointRemoved]]:
    """The checkpoints of one run that are there, and the removals of those that are not.

    Args:
        events: `checkpoint.written` and `checkpoint.removed`, each lane in order; others are passed over.
    """
    at: dict[str, list[Event]] = {}
    written: list[tuple[Event, CheckpointWritten]] = []
    for event in events:
        if isinstance(event.record, CheckpointWritten):
            written.append((event, event.record))
        if isinstance(event.record, CheckpointWritten | CheckpointRemoved):
            at.setdefault(event.record.path, []).append(event)
    held = [(event, record) for event, record in written if not _removed_since(event, at[record.path])]
    there = {record.path for _, record in held}
    last = {path: _last_removal(here) for path, here in at.items() if path not in there}
    return [record for _, record in held], [removed for removed in last.values() if removed is not None]


def _removed_since(written: Event, here: list[Event]) -> bool:
    """Whether what was written was removed after that: within a lane by its order, across lanes by ids."""
    place = here.index(written)
    return any(
        isinstance(e.record, CheckpointRemoved)
        and (i > place if e.lane == written.lane else e.event_id > written.event_id)
        for i, e in enumerate(here)
    )


def _last_removal(here: list[Event]) -> CheckpointRemoved | None:
    return next((e.record for e in reversed(here) if isinstance(e.record, CheckpointRemoved)), None)


def removal_message(removed: CheckpointRemoved) -> str:
    """A sentence that says that a checkpoint was removed, with the remedy."""
    version = removed.policy_version
    return (
        f"The checkpoint of version {version} was removed ({removed.reason}): `rollbook replay weights "
        f"{version}` makes its weights again"
    )


KINDS = frozenset(r.KIND for r in (RunOpened, PolicyActivated, SyncStarted, SyncFinished, SyncFailed))
"""Kinds of events that it is folded from."""


@dataclass(slots=True)
class _Process:
    """The last process of a lane: its model, what it saw engines hold, the syncs it began."""

    command: str = ""
    model: str | None = None
    held: dict[str, str] = field(default_factory=dict)
    syncs: dict[str, tuple[str, SyncStarted]] = field(default_factory=dict)


@dataclass(slots=True)
class InService:
    """Folders that the last process of each lane served, and versions that it is giving to engines.

    Events of one lane come in order, lanes in any.
    """

    _lanes: dict[str, _Process] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Take an event, of whichever kind."""
        process = self._lanes.setdefault(event.lane, _Process())
        match event.record:
            case RunOpened() as record:
                self._lanes[event.lane] = _Process(record.command, record.model)
            case PolicyActivated() as record:
                process.held[record.engine] = record.path
            case SyncStarted() as record:
                process.syncs[record.sync_id] = (event.run, record)
            case SyncFinished() | SyncFailed() as record:
                process.syncs.pop(record.sync_id, None)

    def user_of(self, path: str) -> str | None:
        """Who serves the weights in a checkpoint's folder, for a message; None: nobody known.

        Args:
            path: of the folder, relative to the store. Processes may name it by other paths, so
                only its last parts are compared.
        """
        own = PurePath(path).parts
        for lane, process in sorted(self._lanes.items()):
            if process.model is not None and PurePath(process.model).parts[-len(own) :] == own:
                return f"rollbook {process.command} of lane {lane} was started with it"
            for engine, held in process.held.items():
                if PurePath(held).parts[-len(own) :] == own:
                    return f"engine {engine} holds it"
        return None

    def given(self, run: str, policy: str) -> dict[int, str]:
        """Versions of a policy that a sync is sending to an engine, and to which."""
        begun = [entry for process in self._lanes.values() for entry in process.syncs.values()]
        return {
            sync.policy_version: f"engine {sync.engine} is being given it"
            for of_run, sync in begun
            if (of_run, sync.policy) == (run, policy)
        }
