"""Which checkpoints of a policy may go and why each other one stays; and their removal.

A removal is recorded before it is done: `checkpoint.removed` is durable, then the folder is
renamed, then its files are deleted. The next start of the training, or the next removal,
finishes an interrupted one.

The weights of a version are a fold: an earlier checkpoint, and the steps since run again bit for
bit. So a checkpoint may go as long as the remaining ones can reproduce it: this takes a
checkpoint that steps of its phase may be started from, and every step from there to its version,
none of which is retired or without its tokens. `Keep` names those that stay all the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollbook.store.catalog.catalog import note_removed_checkpoint
from rollbook.store.errors import UpkeepError
from rollbook.store.events import (
    CheckpointRemoved,
    CheckpointWritten,
    Event,
    Json,
    Record,
    StepPlanned,
    TrajectoryErased,
)
from rollbook.store.fold.checkpoints import KINDS as SERVICE_KINDS
from rollbook.store.fold.checkpoints import InService
from rollbook.store.fold.history import KINDS, History, fold_histories
from rollbook.store.log.store import Store
from rollbook.store.safe_paths import fsync_folder, place_inside, removing_alone
from rollbook.store.upkeep.claim import UPKEEP_LANE, training_claim

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
    """The checkpoints of the store's trainings, and what a rule decides for each.

    Raises:
        UpkeepError: no training of that run and policy wrote one.
        CorruptionError: the log is damaged.
    """
    histories, service = fold_histories(log.events_of(KINDS)), InService()
    for event in log.events_of(SERVICE_KINDS):
        service.take(event)
    erased, checkpoints = erased_trajectories(log), list[HeldCheckpoint]()
    for key, history in sorted(histories.items()):
        if run in (None, key[0]) and policy in (None, key[1]):
            checkpoints += _listed(log, history, keep, service, erased)
    if not checkpoints:
        there = {
            f"{p} of {r}"
            for (r, p), training in histories.items()
            if training.checkpoints or training.removed
        }
        wanted = f" of {'any policy' if policy is None else policy} of {'any run' if run is None else run}"
        raise UpkeepError(f"there is no checkpoint{wanted}; there are: {', '.join(sorted(there)) or 'none'}")
    return checkpoints


def _listed(
    log: Store, history: History, keep: Keep, service: InService, erased: Collection[str]
) -> list[HeldCheckpoint]:
    present = [c for c in history.checkpoints if folder_of(log, c, history.run) is not None]
    named = service.given(history.run, history.policy)
    reasons = why_kept(present, steps_taken(history, erased), keep, named, service.user_of)
    why = {record.path: tuple(row) for record, row in zip(present, reasons, strict=True)}
    step_of = {entry.committed.policy_version: step for step, entry in history.steps.items()}

    def row(c: CheckpointWritten | CheckpointRemoved, size: int | None, *more: Any) -> HeldCheckpoint:
        identity = (history.run, history.policy, c.policy_version, step_of.get(c.policy_version), c.path)
        return HeldCheckpoint(*identity, size, c.optimizer_digest is not None, *more)

    checkpoints = [
        row(c, c.bytes if c.path in why else None, why.get(c.path, ())) for c in history.checkpoints
    ]
    checkpoints += [row(r, None, (), r.reason) for r in history.removed]
    return sorted(checkpoints, key=lambda entry: (entry.policy_version, entry.path))


def folder_of(log: Store, record: CheckpointWritten | CheckpointRemoved, run: str) -> Path | None:
    """The folder of a checkpoint; None where it is gone, or is not where a checkpoint of the run lies."""
    if not is_checkpoint_of(record, run):
        return None
    folder = place_inside(log.path, record.path)
    return folder if folder.is_dir() else None


def is_checkpoint_of(record: CheckpointWritten | CheckpointRemoved, run: str) -> bool:
    """Whether a checkpoint's name is one of the run's."""
    parts = PurePosixPath(record.path).parts
    name = _NAME.fullmatch(parts[-1]) if parts[:-1] == ("checkpoints", run, record.policy) else None
    return name is not None and int(name[1]) == record.policy_version


def remove_checkpoint(
    log: Store, run: str, record: CheckpointWritten, reason: str, write: Callable[[Record], None]
) -> bool:
    """Remove a checkpoint; False if it stays because somebody reads it.

    Args:
        write: appends a record of the run, and waits until it is durable.
    """
    folder = folder_of(log, record, run)
    if folder is None and (log.carrier is None or not is_checkpoint_of(record, run)):
        return False
    named = (record.policy, record.policy_version, record.path)
    removed = CheckpointRemoved(*named, record.weights_digest, record.optimizer_digest, reason)
    if folder is None:  # other hosts have it, and find it where hosts share it
        write(removed)
    else:
        with removing_alone(folder) as alone:
            if not alone:
                return False
            write(removed)
            _discard(folder)
    if log.carrier is not None:
        log.carrier.unshare(record.path)
    note_removed_checkpoint(log.path, run, record.path)
    return True


def finish_removals(log: Store, history: History) -> None:
    """Remove what interrupted removals of a policy's checkpoints left. Nobody may train it meanwhile."""
    for record in history.removed:
        discard_removed(log, record, history.run)
    for left in place_inside(log.path, f"checkpoints/{history.run}/{history.policy}").glob(f".v*{_LEFT}"):
        if _NAME.fullmatch(left.name[1 : -len(_LEFT)]):
            shutil.rmtree(left, ignore_errors=True)


def discard_removed(log: Store, record: CheckpointRemoved, run: str) -> bool:
    """Remove what is here of a checkpoint that was removed, and not written again; False if it stays because
    somebody reads it."""
    folder = folder_of(log, record, run)
    if folder is None:
        return True
    with removing_alone(folder) as alone:
        if alone:
            _discard(folder)
            note_removed_checkpoint(log.path, run, record.path)
    return alone


def _discard(folder: Path) -> None:
    """Remove a folder: rename it first, so that a folder under its own name is always complete."""
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
    what = training_claim(run, policy)
    with log.claim(what, "set [checkpoint] keep_last and keep_every in its CONFIG: it removes them itself"):
        history = fold_histories(log.events_of(KINDS)).get((run, policy), History(run, policy))
        finish_removals(log, history)
        goes = {checkpoint.path for checkpoint in list_checkpoints(log, keep, run, policy) if checkpoint.goes}
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


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay, whether something needs them or not.

    Attributes:
        last: how many of the newest that training can resume from, at least 1.
        every: of each range of so many versions, counted from version 0, the first that has one
            stays; None: no others.
    """

    last: int
    every: int | None = None

    def __str__(self) -> str:
        """Words for a reason."""
        return f"keep_last {self.last}" + ("" if self.every is None else f", keep_every {self.every}")


FALLBACK = 2
"""Newest checkpoints that stay where only `every` is said: should one be damaged, the one before is there."""


def keep_of(last: int | None, every: int | None) -> Keep | None:
    """The rule of two settings; None if neither is set, and all checkpoints stay."""
    return None if last is None and every is None else Keep(last or FALLBACK, every)


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The facts about a step that was planned, and not abandoned.

    Attributes:
        began, made: versions; `made` is None of a step that has not committed.
        names: other versions whose weights it uses -> what they are to it.
        again: whether it can be run again: it is not retired, and the tokens of its samples are
            there.
        retired: whether it was given up for replay.
    """

    step: int
    phase: str
    began: int
    made: int | None
    names: Mapping[int, str]
    again: bool = True
    retired: bool = False


def step_taken(plan: StepPlanned, made_version: int | None, **facts: Any) -> StepTaken:
    """The facts about a step that follow from its plan."""
    names: dict[int, str] = {}
    reference, lora = plan.algorithm.get("reference_version"), plan.lora
    if isinstance(reference, int):
        names[reference] = "the reference"
    if lora is not None:
        names[int(lora["base_version"])] = "the base of the low-rank factors"
    return StepTaken(plan.step, plan.phase, plan.policy_version, made_version, names, **facts)


def steps_taken(history: History, erased: Collection[str]) -> list[StepTaken]:
    """The steps of a history, in order.

    Args:
        erased: trajectories whose tokens were erased.
    """
    steps = []
    for number, plan in sorted(history.planned.items()):
        step = history.steps.get(number)
        if step is None and number not in history.pending:
            continue  # it failed for good, or was abandoned
        used = plan if step is None else step.planned
        retired = number in history.retired
        spent = bool(erased) and any(ref["trajectory_id"] in erased for ref in _all_of(used))
        facts = {"again": not retired and not spent, "retired": retired}
        steps.append(step_taken(used, None if step is None else step.committed.policy_version, **facts))
    return steps


def _all_of(plan: StepPlanned) -> list[Json]:
    """References to a step's samples; if it begins a rollout batch, to all samples of the batch."""
    return [*plan.samples, *(plan.rollout_batch or {}).get("samples", ())]


def why_kept(
    present: Sequence[CheckpointWritten],
    steps: Iterable[StepTaken],
    keep: Keep,
    named: Mapping[int, str],
    user_of: Callable[[str], str | None],
) -> list[list[str]]:
    """For each checkpoint, why it stays; an empty list if it may go.

    Args:
        present: those whose folders are there, in the order in which they were written.
        named: versions that something outside of the steps needs -> what.
        user_of: who serves what is at a path, None where nobody does.
    """
    in_order = sorted(steps, key=lambda step: step.step)
    stands = _standing(present)
    why = _needs(stands, in_order, keep, named)
    for version in sorted(stands):
        if not why.get(version) and not _made_again(stands, version, why, in_order):
            why[version] = ["nothing that stays makes it again"]
    newest = max(stands, default=0)
    return [
        _of_record(record, stands[record.policy_version], newest, why, named, user_of) for record in present
    ]


def _of_record(
    record: CheckpointWritten,
    standing: CheckpointWritten,
    newest: int,
    why: Mapping[int, list[str]],
    named: Mapping[int, str],
    user_of: Callable[[str], str | None],
) -> list[str]:
    """Why one checkpoint stays; if a version has several, one of them represents it."""
    version = record.policy_version
    own = list(why.get(version, ()))
    if record is not standing:
        own = ["the newest"] if version == newest else []
        own += [named[version]] if version in named else []
        own += ["version 0"] if version == 0 else []
    if (user := user_of(record.path)) is not None:
        own.append(user)
    return own


def _standing(present: Iterable[CheckpointWritten]) -> dict[int, CheckpointWritten]:
    """Version -> the checkpoint that represents it: the last written, preferring those with an
    optimizer."""
    standing: dict[int, CheckpointWritten] = {}
    for record in present:
        held = standing.get(record.policy_version)
        if held is None or held.optimizer_digest is None or record.optimizer_digest is not None:
            standing[record.policy_version] = record
    return standing


def _needs(
    stands: Mapping[int, CheckpointWritten],
    steps: Sequence[StepTaken],
    keep: Keep,
    named: Mapping[int, str],
) -> dict[int, list[str]]:
    """Version -> who needs it, and what `keep` says."""
    why: dict[int, list[str]] = {version: [] for version in stands}

    def note(version: int, reason: str) -> None:
        if version in why and (version or not why[version]):  # of version 0 that says enough
            why[version].append(reason)

    whole = [v for v in sorted(stands) if stands[v].optimizer_digest is not None]
    note(0, "version 0")
    note(max(stands, default=0), "the newest")
    for version in whole[-1:]:
        note(version, "to resume")
    for version in whole[-keep.last : -1]:
        note(version, f"one of the newest {keep.last}")
    for version in _firsts([0, *whole], keep.every):
        note(version, f"every {keep.every} versions")
    for version, reason in _starts(steps).items():
        note(version, reason)
    for (version, what), number in _named(steps).items():
        note(version, f"{what} of step {number}")
    for version, reason in named.items():
        note(version, reason)
    return why


def _firsts(versions: Iterable[int], every: int | None) -> list[int]:
    """The first existing version of each range of so many; empty if all may go."""
    firsts: dict[int, int] = {}
    if every is not None:
        for version in sorted(versions):
            firsts.setdefault(version // every, version)
    return list(firsts.values())


def _named(steps: Sequence[StepTaken]) -> dict[tuple[int, str], int]:
    """(version, its role for a step to be replayed) -> the first such step."""
    first: dict[tuple[int, str], int] = {}
    for step in steps:
        for version, what in step.names.items():
            if not step.retired:
                first.setdefault((version, what), step.step)
    return first


def _starts(steps: Sequence[StepTaken]) -> dict[int, str]:
    """Versions at which a phase begins that still has a step to be replayed."""
    first: dict[str, StepTaken] = {}
    for step in steps:
        first.setdefault(step.phase, step)
    live = {step.phase for step in steps if not step.retired}
    return {
        opening.began: f"a new optimizer at step {opening.step}"
        for phase, opening in first.items()
        if phase in live
    }


def _made_again(
    stands: Mapping[int, CheckpointWritten],
    version: int,
    why: Mapping[int, list[str]],
    steps: Sequence[StepTaken],
) -> bool:
    """Whether a remaining checkpoint and the steps since can reproduce a version."""
    record = stands[version]
    mine = [step for step in steps if step.phase == record.phase]
    start = mine[0].began if mine else None
    usable = [
        v
        for v, other in stands.items()
        if v < version
        and why[v]
        and (v == start or (other.phase == record.phase and other.optimizer_digest is not None))
    ]
    if not usable:
        return False
    base = max(usable)
    since = [step for step in mine if base <= step.began < version and step.made is not None]
    if not since:  # a number that training went on under from another version
        return stands[base].weights_digest == record.weights_digest
    return all(step.again for step in since) and since[-1].made == version
