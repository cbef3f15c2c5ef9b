"""Removes checkpoints that a rule lets go, and says of each one why it stays.

A removal is an event before it is done: `checkpoint.removed` is durable, then the folder is renamed, then its
files go. What an interrupted one leaves is removed by the next start of the training, or by the next removal.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollbook.store.catalog.catalog import note_removed_checkpoint
from rollbook.store.durable import fsync_folder
from rollbook.store.errors import UpkeepError
from rollbook.store.events import CheckpointRemoved, CheckpointWritten, Event, Record, TrajectoryErased
from rollbook.store.fold.history import KINDS, History, fold_histories
from rollbook.store.fold.in_service import KINDS as SERVICE_KINDS
from rollbook.store.fold.in_service import InService
from rollbook.store.folder_lock import removing_alone
from rollbook.store.inside import place_inside
from rollbook.store.log.store import Store
from rollbook.store.upkeep.checkpoint_rule import Keep, steps_taken, why_kept
from rollbook.store.upkeep.remove import UPKEEP_LANE

_NAME = re.compile(r"v(\d{8,})(?:-[0-9a-f]{8})?")
_LEFT = ".removed"
"""End of the name of a folder whose files are being removed."""


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """A checkpoint that the log has.

    Attributes:
        step: the last step before it; None before any.
        bytes: of its files; None where they are gone.
        optimizer: whether it has the optimizer's state, from which training resumes.
        why_kept: why it stays; empty if the rule lets it go, or it is not there.
        removed: why it was removed; None of one that was not.
    """

    run: str
    policy: str
    policy_version: int
    step: int | None
    path: str
    bytes: int | None
    optimizer: bool
    why_kept: tuple[str, ...] = ()
    removed: str | None = None

    @property
    def goes(self) -> bool:
        """Whether the rule lets it go."""
        return self.bytes is not None and not self.why_kept


def erased_trajectories(log: Store) -> set[str]:
    """Trajectories whose tokens were erased."""
    records = [event.record for event in log.events_of([TrajectoryErased.KIND])]
    return {r.trajectory_id for r in records if isinstance(r, TrajectoryErased) and not r.tokens_kept}


def list_checkpoints(
    log: Store, keep: Keep, run: str | None = None, policy: str | None = None
) -> list[HeldCheckpoint]:
    """The checkpoints of the store's trainings, and what a rule makes of each.

    Raises:
        UpkeepError: no training of that run and policy wrote one.
        CorruptionError: the log is damaged.
    """
    histories, service = fold_histories(log.events_of(KINDS)), InService()
    for event in log.events_of(SERVICE_KINDS):
        service.take(event)
    erased, found = erased_trajectories(log), list[HeldCheckpoint]()
    for key, history in sorted(histories.items()):
        if run in (None, key[0]) and policy in (None, key[1]):
            found += _listed(log, history, keep, service, erased)
    if not found:
        there = {f"{p} of {r}" for (r, p), one in histories.items() if one.checkpoints or one.removed}
        wanted = f" of {'any policy' if policy is None else policy} of {'any run' if run is None else run}"
        raise UpkeepError(f"there is no checkpoint{wanted}; there are: {', '.join(sorted(there)) or 'none'}")
    return found


def _listed(
    log: Store, history: History, keep: Keep, service: InService, erased: Collection[str]
) -> list[HeldCheckpoint]:
    present = [c for c in history.checkpoints if folder_of(log, c, history.run) is not None]
    named = service.given(history.run, history.policy)
    reasons = why_kept(present, steps_taken(history, erased), keep, named, service.user_of)
    why = {record.path: tuple(said) for record, said in zip(present, reasons, strict=True)}
    made = {one.committed.policy_version: step for step, one in history.steps.items()}

    def said(c: CheckpointWritten | CheckpointRemoved, size: int | None, *more: Any) -> HeldCheckpoint:
        of = (history.run, history.policy, c.policy_version, made.get(c.policy_version), c.path)
        return HeldCheckpoint(*of, size, c.optimizer_digest is not None, *more)

    found = [said(c, c.bytes if c.path in why else None, why.get(c.path, ())) for c in history.checkpoints]
    found += [said(r, None, (), r.reason) for r in history.removed]
    return sorted(found, key=lambda one: (one.policy_version, one.path))


def folder_of(log: Store, record: CheckpointWritten | CheckpointRemoved, run: str) -> Path | None:
    """The folder of a checkpoint; None where it is gone, or is not where a checkpoint of the run lies."""
    parts = PurePosixPath(record.path).parts
    if parts[:-1] != ("checkpoints", run, record.policy):
        return None
    name = _NAME.fullmatch(parts[-1])
    if name is None or int(name[1]) != record.policy_version:
        return None
    folder = place_inside(log.path, record.path)
    return folder if folder.is_dir() else None


def remove_checkpoint(
    log: Store, run: str, record: CheckpointWritten, reason: str, write: Callable[[Record], None]
) -> bool:
    """Remove a checkpoint; False if it stays, since somebody reads it.

    Args:
        write: appends a record of the run, and waits until it is durable.
    """
    folder = folder_of(log, record, run)
    if folder is None:
        return False
    with removing_alone(folder) as alone:
        if not alone:
            return False
        named = (record.policy, record.policy_version, record.path)
        write(CheckpointRemoved(*named, record.weights_digest, record.optimizer_digest, reason))
        _discard(folder)
    note_removed_checkpoint(log.path, run, record.path)
    return True


def finish_removals(log: Store, history: History) -> None:
    """Remove what interrupted removals of a policy's checkpoints left. Nobody may train it meanwhile."""
    for record in history.removed:
        folder = folder_of(log, record, history.run)
        if folder is not None:
            with removing_alone(folder) as alone:
                if alone:
                    _discard(folder)
                    note_removed_checkpoint(log.path, history.run, record.path)
    for left in place_inside(log.path, f"checkpoints/{history.run}/{history.policy}").glob(f".v*{_LEFT}"):
        if _NAME.fullmatch(left.name[1 : -len(_LEFT)]):
            shutil.rmtree(left, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Remove a folder: first its name, so that whoever finds it finds all of it."""
    hidden = folder.with_name(f".{folder.name}{_LEFT}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    fsync_folder(folder.parent)
    shutil.rmtree(hidden)


def remove_checkpoints(log: Store, keep: Keep, run: str, policy: str) -> set[str]:
    """Remove the checkpoints of a policy that a rule lets go; the paths of those that went.

    One that is being read stays.

    Raises:
        LaneLockedError: somebody trains the policy.
        UpkeepError: it has no checkpoint.
    """
    what = f"training policy {policy} of run {run}"
    with log.claim(what, "set [checkpoint] keep_last and keep_every in its CONFIG: it removes them itself"):
        history = fold_histories(log.events_of(KINDS)).get((run, policy), History(run, policy))
        finish_removals(log, history)
        goes = {one.path for one in list_checkpoints(log, keep, run, policy) if one.goes}
        if not goes:
            return goes
        with log.writer(UPKEEP_LANE) as writer:

            def write(record: Record) -> None:
                writer.append([Event(record, run)]).result()

            return {
                record.path
                for record in sorted(history.checkpoints, key=lambda record: record.policy_version)
                if record.path in goes and remove_checkpoint(log, run, record, str(keep), write)
            }
