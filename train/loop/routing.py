"""Metrics of a step that replays recorded routing."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.clock import timed
from rollbook.train.data.batch import Batch, MicroBatch, free
from rollbook.train.data.routing import FREE
from rollbook.train.loop.predictions import logprobs_of
from rollbook.train.megatron.policy import Policy


def of_routing(policy: Policy, algorithm: Algorithm, batch: Batch, version: int) -> Json:
    """What was replayed, and what that changes; nothing where routing is not replayed. Before the step.

    Args:
        version: of the policy's weights.

    Returns:
        `routing_replayed`: the share of the positions before each sample's last trained token whose experts
        were replayed: all that logprobs of trained tokens depend on. `own_routing_logprob_gap`: what
        `engine_logprob_gap` would be had the routers chosen, by a forward pass without gradients over the
        first micro-batch of each data-parallel rank alone; None if none of its trained tokens is of this
        version, and absent where engines' logprobs are not asked for.
    """
    if all(micro.experts is None for micro in batch.micro_batches):
        return {}
    counts = np.sum([_replayed(micro) for micro in batch.micro_batches], axis=0)
    found: Json = {"routing_replayed": float(counts[0] / max(counts[1], 1))}
    if "logprobs" in algorithm.needs:
        found["own_routing_logprob_gap"] = _own_gap(policy, batch, version)
    return found


def _replayed(micro: MicroBatch) -> tuple[int, int]:
    """How many of the positions before last trained tokens were replayed, and how many there are."""
    assert micro.experts is not None
    behind = np.flip(np.logical_or.accumulate(np.flip(micro.loss_mask[:, 1:], 1), axis=1), 1)
    return int((behind & (micro.experts[:, :-1, 0, 0] != FREE)).sum()), int(behind.sum())


def _own_gap(policy: Policy, batch: Batch, version: int) -> float | None:
    """The greatest difference of the engine's logprobs from those that the trainer's own routing gives."""
    starts = accumulate(batch.shares[:-1], initial=0)
    firsts = [start for start, share in zip(starts, batch.shares, strict=True) if share]
    asked = free([batch.micro_batches[first] for first in firsts])
    with timed("forward"):
        told = policy.forward(asked, logprobs_of, [min(share, 1) for share in batch.shares])
    gaps = []
    for micro, own in zip(asked, told, strict=True):
        counted = micro.loss_mask[:, 1:] & (micro.versions[:, 1:] == version)
        engine = torch.from_numpy(micro.rollout_logprobs[:, 1:])
        gaps.append((own.cpu() - engine)[torch.from_numpy(counted)].abs())
    every = torch.cat(gaps)
    return float(every.max()) if every.numel() else None
