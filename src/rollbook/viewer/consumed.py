"""What a committed step computed of its samples: advantages, and what it recorded of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.store.errors import RollbookError
from rollbook.store.events import Json, StepCommitted, StepPlanned, StepVectors
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.experience import Experience, Scores, trained_masks
from rollbook.train.batches.manifest_batch import (
    begins,
    experience_at,
    oldest_of,
    recorded_values,
    samples_at_cut,
)
from rollbook.train.select.samples import Sample
from rollbook.viewer.pages import missing
from rollbook.viewer.snapshots import Snapshot

OF_MODELS = frozenset({"old", "reference", "values", "batch_score"})
"""What of an algorithm's needs a model computes as the step begins."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What follows from the log alone of a step's samples.

    Attributes:
        experience: None where the advantages need a model; `why` says so.
        proven: whether the advantages' digest is the step's own.
    """

    experience: Experience | None
    why: str = ""
    proven: bool | None = None

    def means(self) -> list[float]:
        """The mean advantage of each sample's trained tokens; empty where there are none."""
        places = range(0 if self.experience is None else len(self.experience.samples))
        return [float(values.mean()) if len(values := self.advantages(at)) else 0.0 for at in places]

    def advantages(self, at: int) -> Floats:
        """The advantage of each trained token of a sample."""
        assert self.experience is not None
        of = self.experience.advantages
        if of.per_token:
            return self.experience.of(of.values, at)
        return np.full(int(self.experience.masks[at].sum()), of.values[at])


@dataclass(frozen=True, slots=True, eq=False)
class ConsumedSample:
    """A sample as a step had it.

    Attributes:
        mask: bool [T], its trained tokens.
        advantages: of each of these; None where they need a model.
        vectors: stage -> what the step recorded of each of these.
    """

    step: int
    sample: Sample
    mask: npt.NDArray[np.bool_]
    advantages: Floats | None
    vectors: Mapping[str, Floats]

    @property
    def advantage(self) -> float | None:
        """Their mean."""
        return None if self.advantages is None or not len(self.advantages) else float(self.advantages.mean())

    def of_tokens(self, values: Floats | None) -> Floats | None:
        """Values of trained tokens as one for each token [T], NaN for the others."""
        if values is None:
            return None
        whole = np.full(len(self.mask), np.nan)
        whole[self.mask] = values
        return whole


def compute(snapshot: Snapshot, run: str, plan: StepPlanned, digests: Json) -> Computed:
    """The experience of a step, from the log alone, and whether it is what the step had."""

    def computed() -> Computed:
        if not begins(plan) or plan.rollout_batch is not None:
            return Computed(None, "they were computed for a rollout batch of several steps")
        try:
            if needs := recorded_algorithm(plan.algorithm).needs & OF_MODELS:
                return Computed(None, f"they need {', '.join(sorted(needs))} of a model: replay the step")
            samples = samples_at_cut(snapshot.store, plan, run)
            experience = experience_at(plan, samples, lambda *_: Scores())
        except RollbookError as error:
            return Computed(None, str(error))
        return Computed(experience, "", experience.digests().get("advantages") == digests.get("advantages"))

    return snapshot.once(("computed", run, plan.policy, plan.step, plan.attempt), computed)


def consumed_sample(snapshot: Snapshot, run: str, policy: str, step: int, leaf: str) -> ConsumedSample:
    """A sample, by its leaf turn, as a committed step had it.

    Raises:
        RequestError: 404, no step consumed it.
        ReplayError: the log no longer holds what the step had.
    """
    plan, committed = committed_step(snapshot, run, policy, step)
    at = next((at for at, ref in enumerate(plan.samples) if ref["turn_id"] == leaf), None)
    if at is None:
        raise missing(f"sample {leaf!r} of step {step}", "the step's page lists its samples")
    computed, vectors = compute(snapshot, run, plan, committed.digests), _vectors(snapshot, run, plan)
    if (experience := computed.experience) is not None:
        own = {stage: experience.of(values, at) for stage, values in vectors.items()}
        return ConsumedSample(
            step, experience.samples[at], experience.masks[at], computed.advantages(at), own
        )
    samples = samples_at_cut(snapshot.store, plan, run)
    ordered = [samples[ref["turn_id"]] for ref in plan.samples]
    masks = trained_masks(ordered, oldest_of(plan.recipe, plan.policy_version))
    ends = np.cumsum([0, *(int(mask.sum()) for mask in masks)])
    # Where a correction rejected tokens, which only a model tells, the numbers are of the others alone.
    own = {s: values[ends[at] : ends[at + 1]] for s, values in vectors.items() if len(values) == ends[-1]}
    return ConsumedSample(step, ordered[at], masks[at], None, own)


def committed_step(snapshot: Snapshot, run: str, policy: str, step: int) -> tuple[StepPlanned, StepCommitted]:
    """The manifest and the results of a committed step.

    Raises:
        RequestError: 404, no such step was committed.
    """
    # Each kind by itself: DuckDB passes over files without a kind, but not over those without two.
    where = "kind = $kind AND run = $run AND policy = $policy AND step = $step"
    plans, results = (
        [e.record for e in snapshot.events(where, kind=kind, run=run, policy=policy, step=step)]
        for kind in (StepPlanned.KIND, StepCommitted.KIND)
    )
    for committed in results:
        for plan in plans:
            assert isinstance(committed, StepCommitted)
            assert isinstance(plan, StepPlanned)
            if plan.attempt == committed.attempt:
                return plan, committed
    raise missing(f"a committed step {step} of {policy!r}", "the page of the run lists its steps")


def _vectors(snapshot: Snapshot, run: str, plan: StepPlanned) -> dict[str, Floats]:
    """Stage -> what the step recorded of each trained token [P]."""
    where = "kind = 'step.vectors' AND run = $run AND policy = $policy AND step = $step"
    events = snapshot.events(where, run=run, policy=plan.policy, step=plan.step)
    records = [event.record for event in events]
    return {
        record.stage: recorded_values(record).astype(np.float64)
        for record in records
        if isinstance(record, StepVectors) and record.attempt == plan.attempt
    }
