"""Scores: what the trainer's and the reference's weights say of a rollout batch, in forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.store import Store
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten
from rollbook.store.fold.history import History
from rollbook.store.safe_paths import place_inside
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import (
    MicroBatch,
    Partition,
    collate_tokens,
    free,
    in_sample_order,
    micro_batches_of,
    shares_of,
)
from rollbook.train.batches.experience import Bools, Scores
from rollbook.train.checkpoints.checkpoint import weights_named
from rollbook.train.ranks.policy import Policy, Read
from rollbook.train.select.routing import Mixture
from rollbook.train.select.samples import Sample
from rollbook.train.step.critic import token_scores
from rollbook.train.step.predictions import logprobs_of, sample_scores
from rollbook.train.step.reference import ReferenceProcess

REFERENCE = "algorithm.reference_version"


@dataclass(slots=True)
class References:
    """Weights of a policy's earlier versions, read when they are first asked for, of which the last is
    kept.

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
        found = [c for c in self.history.checkpoints if c.policy_version == version]
        if not found:
            there = ", ".join(map(str, self.history.held_versions))
            raise TrainError(
                f"{what} {version}: run {self.history.run!r} has no checkpoint of that "
                f"version of policy {self.history.policy!r} (it has: {there or 'none'})"
                f"{self.history.why_gone(version)}"
            )
        return found[-1]

    def read(self, version: int, what: str = REFERENCE) -> Tensors:
        """The weights of a version, from its checkpoint.

        Args:
            what: asks for it, for an error message.

        Raises:
            TrainError: there is no checkpoint of it.
            ModelError: it is damaged.
        """
        record = self._record(version, what)
        return weights_named(place_inside(self.log.path, record.path), record.weights_digest)

    def logprobs(
        self, policy: Policy, version: int, micro_batches: Sequence[MicroBatch], parts: Partition
    ) -> Callable[[], list[torch.Tensor]]:
        """What gives the reference's logprobs of micro-batches, each [B, T - 1], once they are asked for.

        Args:
            policy: in whose place the reference's weights are put, unless it is apart.

        Raises:
            TrainError, ModelError: as `read`; what is given may raise `ModelError` and `RankError`.
        """
        if self.apart is not None:
            record = self._record(version, REFERENCE)
            path = place_inside(self.log.path, record.path)
            return self.apart.logprobs(path, record.weights_digest, micro_batches)
        with policy.using(self.weights(version)):
            found = policy.forward(micro_batches, logprobs_of, shares_of(parts))
        return lambda: found

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
    """What the algorithm needs of models: of the weights in place, of the reference policy, and of the
    critic.

    Args:
        masks: the trained tokens of each sample.
        parts: the rollout batch's micro-batches: bits depend on how samples are padded or packed.
        mixture: of the policy, if the weights in place replay the routing that turns record; else None.
    """
    collated = [
        collate_tokens([samples[i] for i in part], [masks[i] for i in part], packed=packed, mixture=mixture)
        for part in micro_batches_of(parts)
    ]
    micro_batches = free(collated)
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
        given = policy.forward(micro_batches, sample_scores, shares_of(parts))
        mean = float(torch.cat(given)[:, 0].double().mean())

    def whole() -> Scores:
        reference = None if pending is None else _ordered(micro_batches, parts, pending())
        return Scores(old, reference, values, mean)

    return whole


def part_of(parts: Partition, start: int, end: int) -> Partition:
    """Of a partition the micro-batches of the samples from `start` to `end`, numbered from 0."""
    return [[[i - start for i in micro] for micro in rank if start <= micro[0] < end] for rank in parts]


def joined_partition(parts: Sequence[tuple[int, Partition]]) -> Partition:
    """The partition of samples that come one part after the other: (samples, partition) of each."""
    whole: Partition = [[] for _ in parts[0][1]]
    start = 0
    for count, part in parts:
        for rank, micro_batches in zip(whole, part, strict=True):
            rank += [[start + i for i in micro] for micro in micro_batches]
        start += count
    return whole


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of samples that come one part after the other."""

    def joined(values: Iterable[Singles | None]) -> Singles | None:
        there = [one for one in values if one is not None]
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
    """What is read of the trained tokens of all samples, in their order, float32 [P]."""
    return _ordered(micro_batches, parts, policy.forward(micro_batches, read, shares_of(parts)))


def _ordered(micro_batches: Sequence[MicroBatch], parts: Partition, read: Sequence[torch.Tensor]) -> Singles:
    return in_sample_order(micro_batches, parts, [values.cpu().numpy() for values in read])
