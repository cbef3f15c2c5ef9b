"""Which checkpoints of a policy may go, and why each other one stays. Pure.

The weights of a version are a fold: an earlier checkpoint, and the steps since run again bit for bit. So a
checkpoint may go as long as what stays makes it again: a checkpoint that steps of its phase may be started
from, and every step from there to its version, none of which is retired or without its tokens. `Keep` says
which stay all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.store.events import CheckpointWritten, Json, StepPlanned
from rollbook.store.fold.history import History


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay, whether something needs them or not.

    Attributes:
        last: so many of the newest that training can resume from, at least 1.
        every: of so many versions in a row the first that has one, counted from version 0; None: no others.
    """

    last: int
    every: int | None = None

    def __str__(self) -> str:
        """Words for a reason."""
        return f"keep_last {self.last}" + ("" if self.every is None else f", keep_every {self.every}")


FALLBACK = 2
"""Newest checkpoints that stay where only `every` is said: should one be damaged, the one before is there."""


def keep_of(last: int | None, every: int | None) -> Keep | None:
    """What two settings say together; None where neither is set, and all stay."""
    return None if last is None and every is None else Keep(last or FALLBACK, every)


@dataclass(frozen=True, slots=True)
class StepTaken:
    """What the rule knows of a step that was planned, and not abandoned.

    Attributes:
        began, made: versions; `made` is None of a step that has not committed.
        names: other versions whose weights it takes -> what they are to it.
        again: whether it can be run again: it is not retired, and the tokens of its samples are there.
        retired: whether it was given up for replay.
    """

    step: int
    phase: str
    began: int
    made: int | None
    names: Mapping[int, str]
    again: bool = True
    retired: bool = False


def step_taken(plan: StepPlanned, made: int | None, **said: Any) -> StepTaken:
    """What the rule knows of a step by its plan."""
    names: dict[int, str] = {}
    reference, lora = plan.algorithm.get("reference_version"), plan.lora
    if isinstance(reference, int):
        names[reference] = "the reference"
    if lora is not None:
        names[int(lora["base_version"])] = "the base of the low-rank factors"
    return StepTaken(plan.step, plan.phase, plan.policy_version, made, names, **said)


def steps_taken(history: History, erased: Collection[str]) -> list[StepTaken]:
    """The steps of a history, in order.

    Args:
        erased: trajectories whose tokens were erased.
    """
    found = []
    for number, plan in sorted(history.planned.items()):
        step = history.steps.get(number)
        if step is None and number not in history.pending:
            continue  # it failed for good, or was abandoned
        used = plan if step is None else step.planned
        retired = number in history.retired
        spent = bool(erased) and any(ref["trajectory_id"] in erased for ref in _all_of(used))
        said = {"again": not retired and not spent, "retired": retired}
        found.append(step_taken(used, None if step is None else step.committed.policy_version, **said))
    return found


def _all_of(plan: StepPlanned) -> list[Json]:
    """References to its samples, and, of one that begins a rollout batch, to those of the batch."""
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
    taken = sorted(steps, key=lambda step: step.step)
    stands = _standing(present)
    why = _needs(stands, taken, keep, named)
    for version in sorted(stands):
        if not why.get(version) and not _made_again(stands, version, why, taken):
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
    """Why one checkpoint stays; of a version that has several, one stands for it."""
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
    """Version -> the checkpoint that stands for it: the last written, of whole ones where there is one."""
    found: dict[int, CheckpointWritten] = {}
    for record in present:
        held = found.get(record.policy_version)
        if held is None or held.optimizer_digest is None or record.optimizer_digest is not None:
            found[record.policy_version] = record
    return found


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
    """Of so many versions in a row the first that is there; none where all may go."""
    firsts: dict[int, int] = {}
    if every is not None:
        for version in sorted(versions):
            firsts.setdefault(version // every, version)
    return list(firsts.values())


def _named(steps: Sequence[StepTaken]) -> dict[tuple[int, str], int]:
    """(version, what it is to a step to be replayed) -> the first such step."""
    found: dict[tuple[int, str], int] = {}
    for step in steps:
        for version, what in step.names.items():
            if not step.retired:
                found.setdefault((version, what), step.step)
    return found


def _starts(steps: Sequence[StepTaken]) -> dict[int, str]:
    """Versions at which a phase begins that has a step to be replayed."""
    first: dict[str, StepTaken] = {}
    for step in steps:
        first.setdefault(step.phase, step)
    live = {step.phase for step in steps if not step.retired}
    return {one.began: f"a new optimizer at step {one.step}" for phase, one in first.items() if phase in live}


def _made_again(
    stands: Mapping[int, CheckpointWritten],
    version: int,
    why: Mapping[int, list[str]],
    steps: Sequence[StepTaken],
) -> bool:
    """Whether a checkpoint that stays and the steps since make a version again."""
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
