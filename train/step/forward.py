"""What forward passes of a model give the trained tokens of samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import MicroBatch, Partition, in_sample_order, shares_of
from rollbook.train.ranks.policy import Policy, Read


def passed(
    policy: Policy, micro_batches: Sequence[MicroBatch], parts: Partition, read: Read[torch.Tensor]
) -> Singles:
    """The values that `read` gives the trained tokens of all samples, in sample order, float32 [P]."""
    return ordered(micro_batches, parts, policy.forward(micro_batches, read, shares_of(parts)))


def ordered(micro_batches: Sequence[MicroBatch], parts: Partition, read: Sequence[torch.Tensor]) -> Singles:
    """The same, of the values [B, T - 1] that were read of each micro-batch."""
    return in_sample_order(micro_batches, parts, [values.cpu().numpy() for values in read])
