"""Compares a step that was run again with its record: stage by stage, down to the place that differs.

Whether a step recorded all that it should have, and whether the recorded parts of its stages are
right: hashes of samples and of tensors, and numbers of tokens (`step.vectors`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollbook.replay.claims.training import Trainings
from rollbook.replay.step.tolerances import Arrays, Tolerance, compare_stage, tolerance_of, ulps
from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store.digest import digest_json
from rollbook.store.events import Json
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch
from rollbook.train.clock import is_spent
from rollbook.train.select.samples import Sample
from rollbook.train.source_files import source_digests
from rollbook.train.step.evidence import (
    BESIDE,
    Evidence,
    Hashes,
    RecordedHashes,
    name_in,
    recorded_hashes,
    tensor_hashes,
)
from rollbook.train.step.stages import STAGES

if TYPE_CHECKING:
    import torch

ORDER: Sequence[str] = (
    "training",
    *STAGES[: STAGES.index("samples")],
    *("selection", "schedule"),
    *STAGES[STAGES.index("samples") :],
    *("metrics", "evidence", "checkpoint", "sent", "backed"),
)
"""All stages of a replay, in the order in which they depend on each other."""
ONLY_DIGESTS = "bits are not promised; only a digest was recorded"
"""Why a stage is not proven whose bits are others elsewhere, and of which there are no numbers."""
TensorsOf = Callable[[str, str], "torch.Tensor | None"]
"""(stage, name) -> a tensor of the stage; None where it is not there."""


def no_tensor(stage: str, name: str) -> None:
    """No tensor is there."""


@dataclass(frozen=True, slots=True, eq=False)
class DiffContext:
    """The data to find the place of a difference in a stage.

    Attributes:
        batch: the step's.
        hashes: as recorded; of the inputs, those that the step before recorded of its results.
        values: stage -> what was recorded of each trained token, float32 [P].
        evidence: of the step as it was run now.
        recorded_tensors, tensors: of a stage: a checkpoint's, as far as it has them, and the policy's
            now.
    """

    batch: Batch
    hashes: RecordedHashes
    evidence: Evidence
    values: Mapping[str, Singles] = field(default_factory=dict)
    recorded_tensors: TensorsOf = no_tensor
    tensors: TensorsOf = no_tensor


@dataclass(frozen=True, slots=True)
class Lenient:
    """What tolerances depend on, where bits are not promised.

    Attributes:
        stages: of the step; dtype: of its weights and activations.
        at_checkpoint: whether the step starts right at a checkpoint; else what it starts with is off
            already.
        elsewhere: whether this is another kind of device, which has other generators of random numbers.
    """

    stages: frozenset[str]
    dtype: str
    learning_rate: float
    at_checkpoint: bool
    elsewhere: bool

    def tolerance(self, stage: str) -> Tolerance:
        """How near a stage comes."""
        return tolerance_of(stage, self.stages, self.dtype)


def hashes_of(step: CommittedStep, before: CommittedStep | None) -> RecordedHashes:
    """The hashes that a step recorded, and for its inputs those of the step before.

    Raises:
        ReplayError: they cannot be read.
    """
    own = recorded_hashes(step.committed.hashes)
    if before is None or before.planned.phase != step.planned.phase:
        return own
    last = recorded_hashes(before.committed.hashes).tensors
    inputs = {
        "input_weights": "weights",
        "input_optimizer": "optimizer",
        "critic_input_weights": "critic_weights",
        "critic_input_optimizer": "critic_optimizer",
    }
    return RecordedHashes(
        own.samples, {**own.tensors, **{to: last[stage] for to, stage in inputs.items() if stage in last}}
    )


def compare_digests(
    stage: str, recorded: str | None, replayed: str | None, sides: DiffContext, lenient: Lenient | None = None
) -> StageReplay:
    """The verdict on a stage by its digests; where they differ, with the place.

    Args:
        lenient: bits are not promised here, so numbers are compared within tolerances, where there are any.
    """
    if recorded is None:
        return StageReplay(stage, Verdict.not_recorded, None, replayed)
    if recorded == replayed:
        return StageReplay(stage, Verdict.equal, recorded, replayed)
    if lenient is not None and (near := _nearly(stage, recorded, replayed, sides, lenient)) is not None:
        return near
    place = place_in(stage, sides)
    why = "" if place is None else place.in_words()
    return StageReplay(stage, Verdict.differs, recorded, replayed, why, place)


def _nearly(
    stage: str, recorded: str, replayed: str | None, sides: DiffContext, lenient: Lenient
) -> StageReplay | None:
    """The verdict on a stage whose bits are not promised and differ; None where they have to be the same,
    or its numbers are too far off."""
    if stage.removeprefix("critic_").startswith("input_") and not lenient.at_checkpoint:
        why = "bits are not promised, and steps were run again before"
        return StageReplay(stage, Verdict.not_proven, recorded, replayed, why)
    if stage == "rng" and lenient.elsewhere:
        why = "another kind of device draws from other generators"
        return StageReplay(stage, Verdict.not_proven, recorded, replayed, why)
    if lenient.tolerance(stage).exact:
        return None
    numbers = _numbers(stage, sides)
    if numbers is None:
        return StageReplay(stage, Verdict.not_proven, recorded, replayed, ONLY_DIGESTS)
    near = compare_stage(
        stage, *numbers, stages=lenient.stages, dtype=lenient.dtype, rate=lenient.learning_rate
    )
    if near.verdict == "differs":
        return None
    why = "" if near.worst is None else f"at most {near.worst.share:.0%} of what it may be off"
    tolerance = str(lenient.tolerance(stage))
    return StageReplay(stage, Verdict.within, recorded, replayed, why, tolerance=tolerance)


def _numbers(stage: str, sides: DiffContext) -> tuple[Arrays, Arrays] | None:
    """(recorded, found) numbers of a stage, by name; None where they are not all there."""
    if stage in sides.values and stage in sides.evidence.values:
        return {stage: sides.values[stage]}, {stage: sides.evidence.values[stage]}
    names = [name_in(line) for line in sides.evidence.tensors.get(stage, ())]
    recorded = {name: sides.recorded_tensors(stage, name) for name in names}
    replayed = {name: sides.tensors(stage, name) for name in names}
    if not names or any(t is None for t in (*recorded.values(), *replayed.values())):
        return None
    both = ({n: _wide(t) for n, t in tensors.items() if t is not None} for tensors in (recorded, replayed))
    before, now = both
    return before, now


def place_in(stage: str, sides: DiffContext, sample: int | None = None) -> Place | None:
    """Where a stage begins to differ; None where nothing says.

    Args:
        sample: in which it is known to differ.
    """
    if stage in sides.evidence.tensors:
        return _tensor_place(stage, sides)
    if stage in sides.values and stage in sides.evidence.values:
        recorded_values, found_values = sides.values[stage], sides.evidence.values[stage]
        if (at := place_of_token(sides.batch, recorded_values, found_values, sample)) is not None:
            return at
    if sample is not None:
        return _sample_place(sides.batch, sample)
    if stage not in sides.evidence.samples or stage not in sides.hashes.samples:
        return None
    recorded, replayed = sides.hashes.samples[stage], sides.evidence.samples[stage]
    if recorded.shape != replayed.shape:
        return Place(key="samples", recorded=str(len(recorded)), replayed=str(len(replayed)))
    odd = np.flatnonzero((recorded != replayed).any(-1))
    return _sample_place(sides.batch, int(odd[0])) if len(odd) else None


def _as_stored(value: Any) -> Any:
    """A metric as the log has it: None for one that is no finite number."""
    return None if isinstance(value, float) and not isfinite(value) else value


def metrics(
    step: CommittedStep,
    computed: Json,
    lenient: Lenient | None = None,
    owed: Callable[[str], bool] = lambda name: False,
) -> StageReplay:
    """The stage `metrics`: all that were recorded, except the time and memory that the step took.

    Args:
        owed: whether the step must have recorded a metric that is computed now; else a later release
            added it.
    """
    recorded = {name: value for name, value in step.committed.metrics.items() if not is_spent(name)}
    if missing := sorted(name for name in computed if name not in step.committed.metrics and owed(name)):
        place = Place(key=missing[0], recorded="none", replayed=_as_stored(computed[missing[0]]))
        return StageReplay("metrics", Verdict.differs, why=place.in_words(), place=place)
    due = {name: _as_stored(computed.get(name)) for name in recorded}
    digests = digest_json(recorded), digest_json(due)
    odd = [name for name in recorded if recorded[name] != due[name]]
    if not odd:
        return StageReplay("metrics", Verdict.equal, *digests)
    if lenient is not None:
        far = [name for name in odd if not _metric_near(recorded[name], due[name], lenient)]
        if not far:
            return StageReplay(
                "metrics", Verdict.within, *digests, tolerance=str(lenient.tolerance("metrics"))
            )
        odd = far
    first = odd[0]
    both = recorded[first], due[first]
    apart = _apart(*map(np.float64, both)) if all(isinstance(v, float) for v in both) else None
    place = Place(key=first, recorded=both[0], replayed=both[1], ulps=apart)
    return StageReplay("metrics", Verdict.differs, *digests, why=place.in_words(), place=place)


def _metric_near(recorded: object, due: object, lenient: Lenient) -> bool:
    if not isinstance(recorded, float) or not isinstance(due, float):
        return False
    both = ({"": np.asarray([value])} for value in (recorded, due))
    return compare_stage("metrics", *both, dtype=lenient.dtype).verdict != "differs"


# Places -------------------------------------------------------------------------------------------


def _sample_place(batch: Batch, at: int, **more: object) -> Place:
    sample = batch.samples[at]
    named = {"trajectory_id": sample.trajectory_id, "trajectory": sample.name}
    turn = more.pop("turn_id", sample.leaf_turn_id)
    return Place(sample=at, turn_id=turn, **named, **more)  # type: ignore[arg-type]


def place_of_token(
    batch: Batch, recorded: Singles, replayed: Singles, sample: int | None = None
) -> Place | None:
    """The first trained token, of a sample if one is named, whose value differs, bit by bit."""
    if recorded.shape != replayed.shape:
        return Place(key="trained tokens", recorded=str(len(recorded)), replayed=str(len(replayed)))
    ends = batch.experience.ends
    odd = np.flatnonzero(recorded.view(np.int32) != replayed.view(np.int32))
    if sample is not None:
        odd = odd[(odd >= ends[sample]) & (odd < ends[sample + 1])]
    if not len(odd):
        return None
    first = int(odd[0])
    at = int(np.searchsorted(ends, first, side="right")) - 1
    token = int(np.flatnonzero(batch.experience.masks[at])[first - int(ends[at])])
    both = recorded[first], replayed[first]
    return _sample_place(
        batch,
        at,
        turn_id=turn_of(batch.samples[at], token),
        token=token,
        recorded=float(both[0]),
        replayed=float(both[1]),
        ulps=_apart(*both),
    )


def turn_of(sample: Sample, token: int) -> str:
    """The turn of a sample's path to which a token belongs."""
    return sample.turn_ids[int(np.searchsorted(sample.turn_ends, token, side="right"))]


def _tensor_place(stage: str, sides: DiffContext) -> Place | None:
    """The first tensor, by name, that differs, and its first element where both are there."""
    lines = sides.evidence.tensors[stage]
    names = sorted(map(name_in, lines))
    recorded = sides.hashes.tensors.get(stage)
    if recorded is None:
        return _element_place(stage, names, sides)
    replayed = tensor_hashes(lines)
    if recorded.shape != replayed.shape:
        return Place(key="tensors", recorded=str(len(recorded)), replayed=str(len(replayed)))
    odd = np.flatnonzero((recorded != replayed).any(-1))
    if not len(odd):
        return None
    return _element_place(stage, [names[odd[0]]], sides) or Place(tensor=names[odd[0]])


def _element_place(stage: str, names: Sequence[str], sides: DiffContext) -> Place | None:
    """The first element that differs in the first of these tensors that does, as far as both sides have
    them."""
    for name in names:
        recorded, replayed = sides.recorded_tensors(stage, name), sides.tensors(stage, name)
        if recorded is None or replayed is None:
            continue
        before, now = _wide(recorded), _wide(replayed)
        if before.shape != now.shape:
            return Place(tensor=name, recorded=str(before.shape), replayed=str(now.shape))
        odd = np.flatnonzero(_bits(before) != _bits(now))
        if len(odd):
            at = tuple(int(i) for i in np.unravel_index(int(odd[0]), before.shape))
            both = before[at], now[at]
            values = float(both[0]), float(both[1])
            return Place(tensor=name, element=at, recorded=values[0], replayed=values[1], ulps=_apart(*both))
    return None


def _wide(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    """A tensor as an array; narrow types as the float32 that has their values."""
    wide = tensor.detach().cpu()
    wide = wide.float() if wide.is_floating_point() and wide.element_size() == 2 else wide
    array: npt.NDArray[np.floating] = wide.contiguous().numpy()
    return array


def _bits(array: npt.NDArray[np.floating]) -> npt.NDArray[np.integer]:
    return array.reshape(-1).view({4: np.int32, 8: np.int64}[array.itemsize])


def _apart(first: np.floating, second: np.floating) -> int:
    """The number of values of their type from one to the other."""
    return int(ulps(np.asarray([first]), np.asarray([second]))[0])


STAGE = "evidence"
"""The stage that these parts are."""
_HASHES = "hashes"


@dataclass(frozen=True, slots=True)
class Due:
    """What a step must have recorded, since its release is known to record such things.

    Attributes:
        all: whether it was taken by the sources of this process, which record all that they compute.
        stages, metrics, hashes: names that other steps of its training have, taken in the same
            environment.
        vectors: stages whose numbers its training was to record; None where that is not known.
    """

    all: bool = False
    stages: frozenset[str] = frozenset()
    metrics: frozenset[str] = frozenset()
    hashes: frozenset[str] = frozenset()
    vectors: frozenset[str] | None = None

    def stage(self, name: str) -> bool:
        """Whether it must have recorded a stage, if the stage is found now."""
        return self.all or name in self.stages

    def metric(self, name: str) -> bool:
        """Whether it must have recorded a metric, if the metric is found now."""
        return self.all or name in self.metrics

    def hash_of(self, name: str) -> bool:
        """Whether it must have recorded hashes of a stage, if there are parts of it now."""
        return self.all or name in self.hashes


def due_of(history: History, step: CommittedStep, starts: Trainings) -> Due:
    """What a step must have recorded: a release records the same of each step."""
    plan = step.planned
    opened = starts.opening(plan)
    record = None if opened is None else opened.config.get("record")
    vectors = None if record is None else frozenset(record["vectors"])
    if plan.environment.get("sources") == source_digests():
        return Due(all=True, vectors=vectors)
    stages, metrics, hashes = set[str](), set[str](), set[str]()
    for other in history.of_phase(plan.phase):
        if other is not step and other.planned.environment == plan.environment:
            stages |= other.planned.input_digests.keys() | other.committed.digests.keys()
            metrics |= other.committed.metrics.keys()
            hashes |= _named(other.committed.hashes)
    return Due(False, frozenset(stages), frozenset(metrics), frozenset(hashes), vectors)


def _named(recorded: Json | None) -> set[str]:
    """The stages of which hashes were recorded."""
    hashes = recorded_hashes(recorded)
    return {*hashes.samples, *hashes.tensors}


def with_missing(stages: Mapping[str, StageReplay], due: Due) -> dict[str, StageReplay]:
    """The stages; one that was computed now but not recorded differs, if the step must have recorded it."""
    why = "its digest is missing: the release that took the step records it"
    return {
        name: replace(stage, verdict=Verdict.differs, why=why, place=Place(key=name))
        if stage.verdict == Verdict.not_recorded and stage.replayed is not None and due.stage(name)
        else stage
        for name, stage in stages.items()
    }


def evidence(
    step: CommittedStep,
    sides: DiffContext,
    stages: Mapping[str, StageReplay],
    due: Due,
) -> StageReplay:
    """The stage of a step's recorded parts.

    Parts of a stage that differs are not looked at: it is named already. Where a stage's bits are not
    proven, its parts prove nothing beyond what its numbers do.

    Args:
        stages: as they were compared; parts of others are left out.
    """
    own = recorded_hashes(step.committed.hashes)
    recorded: dict[str, Hashes] = {**own.samples, **own.tensors}
    there = {**sides.evidence.samples, **{s: tensor_hashes(t) for s, t in sides.evidence.tensors.items()}}
    judged = {name for name, stage in stages.items() if stage.verdict != Verdict.differs}
    exact = {name for name in judged if stages[name].verdict in (Verdict.equal, Verdict.not_recorded)}
    beside = {name: of for name, of in BESIDE.items() if name in sides.evidence.values}
    judged |= {name for name, of in beside.items() if of in judged}
    exact |= {name for name, of in beside.items() if of in exact}
    places = [
        *_odd_hashes({n: recorded.get(n) for n in exact}, {n: there[n] for n in exact & there.keys()}, due),
        *_odd_vectors(sides, judged, exact, due.vectors),
    ]
    if places:
        return StageReplay(STAGE, Verdict.differs, why=places[0].in_words(), place=places[0])
    has = {name for name in judged if name in recorded or name in sides.values}
    if has and not has & exact:
        return StageReplay(STAGE, Verdict.not_proven, why="no bits of the stages that it is of are proven")
    return StageReplay(STAGE, Verdict.equal if has else Verdict.not_recorded)


def _odd_hashes(
    recorded: Mapping[str, Hashes | None], replayed: Mapping[str, Hashes], due: Due
) -> Iterator[Place]:
    """The first part of each stage whose hash differs from the recorded one, or is missing."""
    for name, now in replayed.items():
        before, key = recorded.get(name), f"{_HASHES} of {name}"
        if before is None:
            if due.hash_of(name) and not name.startswith(("input_", "critic_input_")):
                yield Place(key=key, recorded="none", replayed=f"{len(now)} of them")
        elif before.shape != now.shape:
            yield Place(key=key, recorded=f"{len(before)} of them", replayed=f"{len(now)} of them")
        elif len(odd := np.flatnonzero((before != now).any(-1))):
            at = int(odd[0])
            yield Place(key=f"{key}, part {at}", recorded=_hex(before[at]), replayed=_hex(now[at]))


def _odd_vectors(
    sides: DiffContext, judged: Collection[str], exact: Collection[str], vectors: Collection[str] | None
) -> Iterator[Place]:
    """The first number of each stage that differs from the recorded one, or that there are none at all."""
    for name in sorted(judged):
        before, now = sides.values.get(name), sides.evidence.values.get(name)
        wanted = vectors is not None and name in vectors and now is not None
        key = f"vectors of {name}"
        if wanted != (before is not None) and vectors is not None:
            both = [_count(values) for values in (before, now if wanted else None)]
            yield Place(key=key, recorded=both[0], replayed=both[1])
        elif before is None or now is None or name not in exact:
            continue
        elif (place := place_of_token(sides.batch, before, now)) is not None:
            yield replace(place, key=key if place.key is None else f"{key}, {place.key}")


def _count(values: Singles | None) -> str:
    return "none" if values is None else f"{len(values)} of them"


def _hex(part: Hashes) -> str:
    return part.tobytes().hex()
