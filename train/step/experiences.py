"""The experience of the rollout batch in hand: computed at its first step, and kept for the others.

Scores of a rollout batch, from forward passes alone, by the trainer's and by the reference's
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, Json, StepPlanned
from rollbook.store.fold.history import History, all_samples
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import (
    Batch,
    MicroBatch,
    Partition,
    build_batch,
    collate_tokens,
    in_sample_order,
    micro_batches_of,
    shares_of,
    without_experts,
)
from rollbook.train.batches.experience import Bools, Experience, Scores, trained_masks
from rollbook.train.batches.manifest_batch import begins, experience_at
from rollbook.train.checkpoints.checkpoint import weights_named
from rollbook.train.clock import timed
from rollbook.train.ranks.kept_digests import Trees
from rollbook.train.ranks.policy import Policy, Read
from rollbook.train.select.routing import Mixture
from rollbook.train.select.samples import Sample
from rollbook.train.step.critic import critic_inputs, token_scores
from rollbook.train.step.predictions import logprobs_of, sample_scores
from rollbook.train.step.reference import ReferenceProcess
from rollbook.train.step.step import input_digests

REFERENCE = "algorithm.reference_version"


@dataclass(slots=True)
class References:
    """Weights of a policy's earlier versions, read when they are first needed; those of the last
    one are cached.

    Attributes:
        apart: the process that the reference's forward passes run in; None: that of the policy.
    """

    log: Store
    history: History
    apart: ReferenceProcess | None = None
    _held: tuple[int, Tensors] | None = field(default=None)

    def weights(self, version: int) -> Tensors:
        """The weights of a version, as the algorithm's reference.

        Raises:
            TrainError: there is no checkpoint of it.
            ModelError: it is damaged.
        """
        if self._held is None or self._held[0] != version:
            self._held = (version, self.read(version))
        return self._held[1]

    def digest(self, version: int) -> str:
        """Digest of its weights, as the log has it.

        Raises:
            TrainError: there is no checkpoint of it.
        """
        return self._record(version, REFERENCE).weights_digest

    def _record(self, version: int, what: str) -> CheckpointWritten:
        checkpoints = [c for c in self.history.checkpoints if c.policy_version == version]
        if not checkpoints:
            there = ", ".join(map(str, self.history.held_versions))
            raise TrainError(
                f"{what} {version}: run {self.history.run!r} has no checkpoint of that "
                f"version of policy {self.history.policy!r} (it has: {there or 'none'})"
                f"{self.history.why_gone(version)}"
            )
        return checkpoints[-1]

    def read(self, version: int, what: str = REFERENCE) -> Tensors:
        """The weights of a version, from its checkpoint.

        Args:
            what: needs it, for an error message.

        Raises:
            TrainError: there is no checkpoint of it.
            ModelError: it is damaged.
        """
        record = self._record(version, what)
        return weights_named(self.log.folder(record.path), record.weights_digest)

    def logprobs(
        self, policy: Policy, version: int, micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], list[torch.Tensor]]:
        """A function that returns the reference's logprobs of micro-batches, each [B, T - 1].

        Args:
            policy: in which the reference's weights are put in place, unless the reference has
                its own process.

        Raises:
            TrainError, ModelError: as `read`; the function may raise `ModelError` and
                `RankError`.
        """
        if self.apart is not None:
            record = self._record(version, REFERENCE)
            path = self.log.folder(record.path)
            return self.apart.logprobs(path, record.weights_digest, micro_batches)
        with policy.using(self.weights(version)):
            logprobs = policy.forward(micro_batches, logprobs_of, shares_of(parts))
        return lambda: logprobs

    def close(self) -> None:
        """End the process of the reference, if it has one."""
        if self.apart is not None:
            self.apart.close()


Pending = Callable[[], Scores]
"""Gives scores, of which some may still be computed."""


def score(
    policy: Policy,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    masks: Sequence[Bools],
    parts: Partition,
    references: References,
    critic: Policy | None = None,
    *,
    packed: bool,
    mixture: Mixture | None = None,
) -> Pending:
    """The scores that the algorithm needs: by the weights in place, by the reference policy, and by
    the critic.

    Args:
        masks: the trained tokens of each sample.
        parts: the rollout batch's micro-batches: bits depend on how samples are padded or
            packed.
        mixture: of the policy, if the weights in place replay the routing that turns record;
            else None.
    """
    collated = [
        collate_tokens([samples[i] for i in part], [masks[i] for i in part], packed=packed, mixture=mixture)
        for part in micro_batches_of(parts)
    ]
    micro_batches = without_experts(collated)
    old = pending = values = None
    if algorithm.reference is not None:  # first, so that one apart computes while these do
        pending = references.logprobs(policy, algorithm.reference, micro_batches, parts)
    if "old" in algorithm.needs:
        old = _joined(policy, collated, parts, logprobs_of)
    if "values" in algorithm.needs:
        assert critic is not None
        values = _joined(critic, micro_batches, parts, token_scores)
    mean = None
    if "batch_score" in algorithm.needs:
        scores = policy.forward(micro_batches, sample_scores, shares_of(parts))
        mean = float(torch.cat(scores)[:, 0].double().mean())

    def whole() -> Scores:
        reference = None if pending is None else _ordered(micro_batches, parts, pending())
        return Scores(old, reference, values, mean)

    return whole


def part_of(parts: Partition, start: int, end: int) -> Partition:
    """The micro-batches of a partition that hold the samples from `start` to `end`, renumbered from
    0."""
    return [[[i - start for i in micro] for micro in rank if start <= micro[0] < end] for rank in parts]


def joined_partition(parts: Sequence[tuple[int, Partition]]) -> Partition:
    """The partition of consecutive parts, each given as (samples, partition)."""
    whole: Partition = [[] for _ in parts[0][1]]
    start = 0
    for count, part in parts:
        for rank, micro_batches in zip(whole, part, strict=True):
            rank += [[start + i for i in micro] for micro in micro_batches]
        start += count
    return whole


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of consecutive parts of samples."""

    def joined(values: Iterable[Singles | None]) -> Singles | None:
        there = [array for array in values if array is not None]
        return np.concatenate(there) if there else None

    return Scores(
        joined(part.old_logprobs for part in parts),
        joined(part.reference_logprobs for part in parts),
        joined(part.values for part in parts),
        parts[0].batch_score,
    )


def _joined(
    policy: Policy, micro_batches: Sequence[MicroBatch], parts: Partition, read: Read[torch.Tensor]
) -> Singles:
    """The values that `read` gives the trained tokens of all samples, in sample order, float32 [P]."""
    return _ordered(micro_batches, parts, policy.forward(micro_batches, read, shares_of(parts)))


def _ordered(micro_batches: Sequence[MicroBatch], parts: Partition, read: Sequence[torch.Tensor]) -> Singles:
    return in_sample_order(micro_batches, parts, [values.cpu().numpy() for values in read])


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

    def input_digests(self, algorithm: Algorithm, seed: int, trees: Trees) -> Json:
        """Seed the generators, and digest the state that a step starts from.

        Raises:
            TrainError: there is no checkpoint of the reference policy.
        """
        digests = input_digests(self._policy, seed, trees)
        if algorithm.reference is not None:
            digests["reference_weights"] = self._references.digest(algorithm.reference)
        return digests if self.critic is None else digests | critic_inputs(self.critic, trees)

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
