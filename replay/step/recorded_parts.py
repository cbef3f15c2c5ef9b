"""Whether a step recorded all that it should have, and whether the recorded parts of its stages are
right: hashes of samples and of tensors, and numbers of tokens (`step.vectors`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rollbook.replay.claims.training import Trainings
from rollbook.replay.step.compare import DiffContext, place_of_token
from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store.events import Json
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.environment import source_digests
from rollbook.train.step.evidence import Hashes, recorded_hashes, tensor_hashes

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
    places = [
        *_odd_hashes({n: recorded.get(n) for n in exact}, {n: there[n] for n in exact & there.keys()}, due),
        *_odd_vectors(sides, judged, exact, due.vectors),
    ]
    if places:
        return StageReplay(STAGE, Verdict.differs, why=places[0].said(), place=places[0])
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
