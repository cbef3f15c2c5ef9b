"""The experience of the rollout batch in hand: computed at its first step, and kept for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import all_samples
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch, Partition, build_batch
from rollbook.train.batches.experience import Bools, Experience, Scores, trained_masks
from rollbook.train.batches.manifest_batch import begins, experience_at
from rollbook.train.clock import timed
from rollbook.train.ranks.policy import Policy
from rollbook.train.select.routing import Mixture
from rollbook.train.select.samples import Sample
from rollbook.train.step.critic import critic_inputs
from rollbook.train.step.scoring import Pending, References, joined_partition, joined_scores, part_of, score
from rollbook.train.step.step import input_digests


class Experiences:
    """Builds the batches of a policy's steps, which are run in order."""

    def __init__(self, policy: Policy, references: References, critic: Policy | None = None) -> None:
        self._policy, self._references, self.critic = policy, references, critic
        self._ahead: list[_Scored] = []
        """Parts of the rollout batch to come."""
        self._held: Experience | None = None
        self._places: dict[str, list[int]] = {}
        """Leaf turn -> the places of its sample in the rollout batch."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples of the rollout batch in hand, in order."""
        return () if self._held is None else self._held.samples

    def input_digests(self, algorithm: Algorithm, seed: int) -> Json:
        """Seed the generators, and digest the state that a step starts from.

        Raises:
            TrainError: there is no checkpoint of the reference policy.
        """
        digests = input_digests(self._policy, seed)
        if algorithm.reference is not None:
            digests["reference_weights"] = self._references.digest(algorithm.reference)
        return digests if self.critic is None else digests | critic_inputs(self.critic)

    def score_ahead(
        self,
        algorithm: Algorithm,
        samples: Sequence[Sample],
        parts: Partition,
        oldest: int | None,
        *,
        packed: bool,
        routing_replay: bool,
    ) -> None:
        """Score a part of the next rollout batch.

        Args:
            parts: its micro-batches.
            oldest: version before which tokens are masked; None: none are.
            packed, routing_replay: as the manifest will have them.

        Raises:
            TrainError, ModelError: as `batch`.
        """
        masks = trained_masks(samples, oldest)
        scores = score(
            self._policy,
            algorithm,
            samples,
            masks,
            parts,
            self._references,
            self.critic,
            packed=packed,
            mixture=self._policy.shape.mixture if routing_replay else None,
        )
        self._ahead.append(_Scored([sample.leaf_turn_id for sample in samples], parts, scores))

    def came(self, samples: Sequence[Sample]) -> tuple[Partition, list[int]] | None:
        """How the rollout batch at hand was scored ahead: its micro-batches, and the samples of
        each part. None if it differs from what was scored, or nothing was: then it is scored
        whole."""
        leaves = [leaf for part in self._ahead for leaf in part.leaves]
        if not leaves or leaves != [sample.leaf_turn_id for sample in samples]:
            self._ahead = []
            return None
        sizes = [len(part.leaves) for part in self._ahead]
        return joined_partition([(len(part.leaves), part.parts) for part in self._ahead]), sizes

    def batch(self, plan: StepPlanned, samples: Mapping[str, Sample]) -> Batch:
        """The batch that a manifest describes.

        Args:
            samples: by leaf turn, those of the whole rollout batch, if the step begins one; else not looked
                at.

        Raises:
            TrainError, ModelError: there is no checkpoint of the reference policy, or it is damaged.
        """
        if begins(plan):
            self._make(plan, samples)
        assert self._held is not None
        mixture = self._mixture(plan)
        if plan.rollout_batch is None:
            return build_batch(self._held, plan.partition, packed=plan.packed, mixture=mixture)
        places = {turn_id: iter(at) for turn_id, at in self._places.items()}
        part = self._held.part([next(places[ref["turn_id"]]) for ref in plan.samples])
        return build_batch(part, plan.partition, packed=plan.packed, mixture=mixture)

    def _mixture(self, plan: StepPlanned) -> Mixture | None:
        return self._policy.shape.mixture if plan.routing_replay else None

    def _make(self, plan: StepPlanned, samples: Mapping[str, Sample]) -> None:
        ahead, self._ahead = self._ahead, []

        def scores_of(ordered: Sequence[Sample], masks: Sequence[Bools]) -> Scores:
            with timed("scoring"):
                pending = [part.scores for part in ahead] or self._scored(plan, ordered, masks)
                return joined_scores([part() for part in pending])

        self._held = experience_at(plan, samples, scores_of)
        self._places = {}
        for place, ref in enumerate(all_samples(plan)):
            self._places.setdefault(ref["turn_id"], []).append(place)

    def _scored(self, plan: StepPlanned, samples: Sequence[Sample], masks: Sequence[Bools]) -> list[Pending]:
        """The scores of a rollout batch, in the parts that its manifest names."""
        algorithm, batch = recorded_algorithm(plan.algorithm), plan.rollout_batch or {}
        parts = batch.get("partition", plan.partition)
        ends = np.cumsum([0, *batch.get("iterations", [len(samples)])]).tolist()
        return [
            score(
                self._policy,
                algorithm,
                samples[start:end],
                masks[start:end],
                part_of(parts, start, end),
                self._references,
                self.critic,
                packed=plan.packed,
                mixture=self._mixture(plan),
            )
            for start, end in pairwise(ends)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """A scored part of a rollout batch: the leaf turns of its samples, its micro-batches, and its
    scores."""

    leaves: list[str]
    parts: Partition
    scores: Pending
