"""Replays a part of a step: some of its stages, for all its samples or some, with or without its
model.

Without a model: up to the advantages where the algorithm asks none; up to the losses where the step
recorded what it asks of models (`[record] vectors`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollbook.replay.step.compare import (
    ONLY_DIGESTS,
    ORDER,
    DiffContext,
    Due,
    Lenient,
    compare_digests,
    hashes_of,
    place_in,
    place_of_token,
    with_missing,
)
from rollbook.replay.step.compare import STAGE as EVIDENCE
from rollbook.replay.step.compare import evidence as of_parts
from rollbook.replay.step.tolerances import compare_stage
from rollbook.replay.verdict import Place, StageReplay, Verdict
from rollbook.store import Store
from rollbook.store.digest import digest_arrays
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch, build_batch, in_sample_order, micro_batches_of
from rollbook.train.batches.experience import Bools, Scores
from rollbook.train.batches.manifest_batch import begins, experience_at, samples_at_cut
from rollbook.train.select.samples import Sample
from rollbook.train.step.evidence import of_batch, of_tokens

FORWARD = ("logprobs", "losses")
"""The stages of a forward pass."""
OF_MODELS = {"old": "proximal_logprobs", "values": "values"}
"""What an algorithm needs of models, and the stage that it is."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a step.

    Attributes:
        first, last: stages.
        samples: places in the manifest; None: all.
        model: whether its weights are there to be run; if not, what was recorded of their outputs is
            taken.
    """

    first: str = ORDER[0]
    last: str = "losses"
    samples: frozenset[int] | None = None
    model: bool = True

    @property
    def passes_alone(self) -> bool:
        """Whether it ends with the forward passes, so that nothing after them is run."""
        return ORDER.index(self.last) <= ORDER.index(FORWARD[-1])

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages from the first to the last."""
        return tuple(ORDER[ORDER.index(self.first) : ORDER.index(self.last) + 1])

    @property
    def shown(self) -> tuple[str, ...]:
        """The stages to report: these, and what the step recorded of their parts."""
        return self.stages if EVIDENCE in self.stages else (*self.stages, EVIDENCE)


def chosen(
    plan: StepPlanned,
    named: Mapping[str, str | None],
    *,
    samples: Collection[str] = (),
    groups: Collection[str] = (),
    micro_batches: Collection[int] = (),
) -> frozenset[int] | None:
    """The places of the samples that are asked for; None where nothing is.

    Args:
        named: trajectory -> its group.
        samples: places, or ids (or their ends) of leaf turns or trajectories.

    Raises:
        ReplayError: there is no such sample, group or micro-batch.
    """
    if not samples and not groups and not micro_batches:
        return None
    places: set[int] = set()
    for name in samples:
        at = [i for i, ref in enumerate(plan.samples) if name == str(i) or _names(ref, name)]
        if not at:
            raise ReplayError(f"step {plan.step} has no sample {name!r}: it has {len(plan.samples)}, from 0")
        places |= set(at)
    for group in groups:
        at = [i for i, ref in enumerate(plan.samples) if named.get(ref["trajectory_id"]) == group]
        if not at:
            there = ", ".join(sorted({str(g) for g in named.values() if g is not None})[:8]) or "none"
            raise ReplayError(f"step {plan.step} has no sample of group {group!r}: its groups are {there}")
        places |= set(at)
    parts = micro_batches_of(plan.partition)
    for number in micro_batches:
        if not 0 <= number < len(parts):
            raise ReplayError(f"step {plan.step} has no micro-batch {number}: it has {len(parts)}, from 0")
        places |= set(parts[number])
    return frozenset(places)


def _names(ref: Json, suffix: str) -> bool:
    return len(suffix) > 3 and any(ref[key].endswith(suffix) for key in ("turn_id", "trajectory_id"))


def recorded_batch(log: Store, history: History, plan: StepPlanned, values: Mapping[str, Singles]) -> Batch:
    """The batch of a step by the log alone: models' numbers for its tokens are taken as the step recorded
    them.

    Args:
        values: stage -> what was recorded of each trained token.

    Raises:
        ReplayError: some of these were not recorded; or the log does not hold a sample.
    """
    algorithm = recorded_algorithm(plan.algorithm)
    if not begins(plan) or (plan.rollout_batch is not None and plan.rollout_batch["steps"] > 1):
        raise ReplayError(
            f"step {plan.step} is one of several on a rollout batch: its advantages need a model, for what "
            "was recorded is of this step alone"
        )
    samples = samples_at_cut(log, plan, history.run)

    def scores_of(ordered: Sequence[Sample], masks: Sequence[Bools]) -> Scores:
        wanted = {need: stage for need, stage in OF_MODELS.items() if need in algorithm.needs}
        wanted |= {} if algorithm.reference is None else {"reference": "reference_logprobs"}
        if "batch_score" in algorithm.needs:
            wanted["batch_score"] = "batch_score"
        if missing := sorted(set(wanted.values()) - values.keys()):
            raise ReplayError(
                f"step {plan.step} recorded no {', '.join(missing)} ([record] vectors of a CONFIG): "
                "without a model its advantages cannot be computed"
            )
        return Scores(
            values[wanted["old"]] if "old" in wanted else None,
            values["reference_logprobs"] if "reference" in wanted else None,
            values["values"] if "values" in wanted else None,
        )

    experience = experience_at(plan, samples, scores_of)
    return build_batch(experience, plan.partition, packed=plan.packed)


def why_no_losses(plan: StepPlanned, values: Mapping[str, Singles]) -> str | None:
    """Why the log alone does not give a step's losses; None where it does.

    Args:
        values: stage -> what was recorded of each trained token.
    """
    if "logprobs" not in values:
        return (
            f"step {plan.step} recorded no logprobs ([record] vectors of a CONFIG): its losses need the "
            "model, or --to advantages"
        )
    if "entropy" in recorded_algorithm(plan.algorithm).needs:
        return f"step {plan.step}: its loss needs the entropy, which only the model gives"
    return None


def part_stages(
    step: CommittedStep, part: Part, source: NumbersSource, due: Due, lenient: Lenient | None = None
) -> dict[str, StageReplay]:
    """Run a part of a step, and compare its stages as far as they were asked for.

    For some samples alone the hashes are compared: a stage's digest is of all samples.

    Args:
        source: gives the batch, and the numbers of its passes.
        due: what the step must have recorded.
        lenient: bits are not promised here, so numbers are compared within tolerances.

    Raises:
        ReplayError: what it needs was not recorded, or is not in the log.
    """
    plan, batch = step.planned, source.batch
    evidence = of_batch(batch)
    replayed: Json = dict(batch.digests())
    if not set(FORWARD).isdisjoint(part.stages):
        values, losses = source.passes(batch, part)
        arrays = {"logprobs": values, "losses": losses}
        if part.samples is None:
            replayed |= {
                s: digest_arrays({str(i): a for i, a in enumerate(parts)}) for s, parts in arrays.items()
            }
        whole = {
            s: in_sample_order(batch.micro_batches, plan.partition, parts) for s, parts in arrays.items()
        }
        evidence |= of_tokens(batch, **whole)
    sides = DiffContext(batch, hashes_of(step, None), evidence, source.values)
    stages = [stage for stage in part.stages if stage in replayed or stage in evidence.samples]
    if part.samples is None:
        recorded = step.committed.digests
        judged = {s: compare_digests(s, recorded.get(s), replayed.get(s), sides, lenient) for s in stages}
        judged = with_missing(judged, due)
        return judged | {EVIDENCE: of_parts(step, sides, judged, due)}
    return {stage: compare_samples(stage, sorted(part.samples), sides, lenient) for stage in stages}


def compare_samples(
    stage: str, samples: Sequence[int], sides: DiffContext, lenient: Lenient | None = None
) -> StageReplay:
    """The verdict on a stage of some samples: by the hashes that the step recorded, and by the numbers, as
    far as it recorded these."""
    recorded, replayed = sides.hashes.samples.get(stage), sides.evidence.samples.get(stage)
    if recorded is None or replayed is None:
        return StageReplay(stage, Verdict.not_recorded)
    if recorded.shape != replayed.shape:
        place = Place(key="samples", recorded=str(len(recorded)), replayed=str(len(replayed)))
        return StageReplay(stage, Verdict.differs, why=place.in_words(), place=place)
    odd = [at for at in samples if (recorded[at] != replayed[at]).any()]
    hashes = [array[list(samples)].tobytes().hex() for array in (recorded, replayed)]
    if odd and lenient is not None and not lenient.tolerance(stage).exact:
        return _some_nearly(stage, samples, sides, lenient, hashes)
    places = [place_in(stage, sides, at) for at in odd[:1]] or list(_odd_numbers(stage, samples, sides))
    if not odd and not places:
        return StageReplay(stage, Verdict.equal, hashes[0], hashes[1])
    why = "" if places[0] is None else places[0].in_words()
    return StageReplay(stage, Verdict.differs, hashes[0], hashes[1], why, places[0])


def _odd_numbers(stage: str, samples: Sequence[int], sides: DiffContext) -> Iterator[Place]:
    """Where the numbers of these samples differ from those that the step recorded."""
    before, now = sides.values.get(stage), sides.evidence.values.get(stage)
    if before is None or now is None:
        return
    for at in samples:
        if (place := place_of_token(sides.batch, before, now, at)) is not None:
            yield place


def _some_nearly(
    stage: str, samples: Sequence[int], sides: DiffContext, lenient: Lenient, hashes: Sequence[str]
) -> StageReplay:
    """The verdict on a stage of some samples whose bits differ, and are not promised."""
    recorded, replayed = hashes
    before, now = sides.values.get(stage), sides.evidence.values.get(stage)
    if before is None or now is None or before.shape != now.shape:
        return StageReplay(stage, Verdict.not_proven, recorded, replayed, ONLY_DIGESTS)
    experience = sides.batch.experience
    both = (
        {stage: np.concatenate([experience.of(values, at) for at in samples])} for values in (before, now)
    )
    near = compare_stage(stage, *both, stages=lenient.stages, dtype=lenient.dtype)
    if near.verdict == "differs":
        return StageReplay(stage, Verdict.differs, recorded, replayed, str(near.worst or near.unlike))
    tolerance = str(lenient.tolerance(stage))
    return StageReplay(stage, Verdict.within, recorded, replayed, tolerance=tolerance)


class NumbersSource(Protocol):
    """What gives a step's numbers: its model, or the log.

    Attributes:
        values: stage -> what the step recorded of each trained token.
    """

    batch: Batch
    values: Mapping[str, Singles]

    def passes(self, batch: Batch, part: Part) -> tuple[list[Singles], list[Singles]]:
        """(logprobs, losses) of each micro-batch, each [B, T - 1]; 0 of those that were not asked for."""
