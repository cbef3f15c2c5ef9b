"""The forward passes of a step, whose numbers are given by its policy, or by the log alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rollbook.replay.step.partial import Part
from rollbook.store.events import StepPlanned
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch, MicroBatch, micro_batches_of
from rollbook.train.ranks.policy import Policy
from rollbook.train.step.step import PolicyLoss, loss_inputs


def recorded_passes(
    plan: StepPlanned, batch: Batch, recorded: Singles
) -> tuple[list[Singles], list[Singles]]:
    """(logprobs, losses) of each micro-batch, each [B, T - 1], from the logprobs that a step recorded.

    Args:
        recorded: of each trained token.
    """
    torch.set_num_threads(int(plan.environment["threads"]))
    algorithm = recorded_algorithm(plan.algorithm)
    totals = Totals(batch.trained_tokens, batch.trained_samples)
    values, losses = list[Singles](), list[Singles]()
    for micro, places in zip(batch.micro_batches, micro_batches_of(plan.partition), strict=True):
        values.append(_placed(micro, places, batch, recorded))
        inputs = loss_inputs(torch.from_numpy(values[-1]), micro, None, totals)
        with torch.no_grad():
            losses.append(torch.where(inputs.mask, algorithm.loss(inputs), 0.0).numpy())
    return values, losses


def _placed(micro: MicroBatch, places: Sequence[int], batch: Batch, values: Singles) -> Singles:
    """Values of trained tokens [P] at their places in a micro-batch, 0 elsewhere, [B, T - 1]."""
    experience, placed = batch.experience, np.zeros(micro.tokens.shape, np.float32)
    for row, i in enumerate(places):
        placed[row, np.flatnonzero(experience.masks[i])] = experience.of(values, i)
    return placed[:, 1:]


@dataclass(slots=True, eq=False)
class ModelNumbers:
    """Numbers from the policy, in forward passes over the micro-batches that are asked for."""

    plan: StepPlanned
    batch: Batch
    values: Mapping[str, Singles]
    policy: Policy

    def passes(self, batch: Batch, part: Part) -> tuple[list[Singles], list[Singles]]:
        """As of the protocol."""
        plan = self.plan
        totals = Totals(batch.trained_tokens, batch.trained_samples)
        loss_of = PolicyLoss(recorded_algorithm(plan.algorithm), plan.policy_version, totals)
        places = micro_batches_of(plan.partition)
        wanted = [
            i for i, members in enumerate(places) if part.samples is None or part.samples & set(members)
        ]
        shares, starts = [], np.cumsum([0, *batch.shares])
        for start, end in pairwise(starts.tolist()):
            shares.append(sum(start <= i < end for i in wanted))
        outputs = self.policy.forward([batch.micro_batches[i] for i in wanted], TokenLosses(loss_of), shares)
        values = [np.zeros(micro.tokens[:, 1:].shape, np.float32) for micro in batch.micro_batches]
        losses = [array.copy() for array in values]
        for i, (value, loss) in zip(wanted, outputs, strict=True):
            values[i], losses[i] = value.cpu().numpy(), loss.cpu().numpy()
        return values, losses


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a forward pass keeps of a micro-batch's loss. It is sent to other ranks."""

    loss_of: PolicyLoss

    def __call__(self, outputs: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, losses), each [B, T - 1]."""
        _, kept = self.loss_of(outputs, micro)
        return kept.values, kept.losses
