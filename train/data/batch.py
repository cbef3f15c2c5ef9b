"""The batch of one optimizer step as aligned arrays, a pure function of its samples and algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.store.digest import digest_arrays
from rollbook.store.events import Json
from rollbook.train.algorithms.advantages import Floats
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.data.samples import Sample

Partition = list[list[list[int]]]
"""Data-parallel rank -> micro-batch -> positions of its samples in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B samples padded to the longest (T), all [B, T]; tokens, versions int64, loss_mask bool, else float32.

    `old_logprobs` is 0 where the mask is false, and everywhere for samples without logprobs; `versions` is -1
    where no policy version sampled a token.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    old_logprobs: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The samples of a step, their rewards and advantages (float64 [N]), and the micro-batches."""

    samples: tuple[Sample, ...]
    rewards: Floats
    advantages: Floats
    micro_batches: tuple[MicroBatch, ...]

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss, over the whole batch."""
        return int(sum(m.loss_mask.sum() for m in self.micro_batches))

    def digests(self) -> Json:
        """Digests of the stages that come before the model: samples, rewards, advantages, old_logprobs.

        Each stage holds what the others do not, so that a change names its own stage.
        """
        what = ("tokens", "loss_mask", "versions", "temperatures")
        arrays = {f"{i}.{name}": getattr(s, name) for i, s in enumerate(self.samples) for name in what}
        layout = {f"micro.{i}": m.tokens for i, m in enumerate(self.micro_batches)}
        old = {f"{i}": s.logprobs for i, s in enumerate(self.samples)}
        return {
            "samples": digest_arrays(arrays | layout),
            "rewards": digest_arrays({"rewards": self.rewards}),
            "advantages": digest_arrays({"advantages": self.advantages}),
            "old_logprobs": digest_arrays(old),
        }


def partition(count: int, micro_batch_size: int | None) -> Partition:
    """One rank; samples in order, `micro_batch_size` (default: all) to a micro-batch."""
    size = micro_batch_size or max(count, 1)
    return [[list(range(i, min(i + size, count))) for i in range(0, count, size)]]


def build_batch(samples: Sequence[Sample], algorithm: Algorithm, parts: Partition, rank: int = 0) -> Batch:
    """The batch of ordered samples, each weighed by the advantage that the algorithm gives it."""
    rewards = np.array([np.nan if s.reward is None else s.reward for s in samples], np.float64)
    groups = [s.group or s.trajectory_id for s in samples]
    advantages = algorithm.advantages(rewards, groups, [s.trajectory_id for s in samples])
    micro = tuple(_collate([samples[i] for i in part], advantages[part]) for part in parts[rank])
    return Batch(tuple(samples), rewards, advantages, micro)


def _collate(samples: Sequence[Sample], advantages_B: Floats) -> MicroBatch:
    shape = (len(samples), max(len(s) for s in samples))
    micro = MicroBatch(
        np.zeros(shape, np.int64),
        np.zeros(shape, np.bool_),
        np.zeros(shape, np.float32),
        np.ones(shape, np.float32),
        np.zeros(shape, np.float32),
        np.full(shape, -1, np.int64),
    )
    for row, sample in enumerate(samples):
        length = len(sample)
        micro.tokens[row, :length] = sample.tokens
        micro.loss_mask[row, :length] = sample.loss_mask
        micro.old_logprobs[row, :length] = sample.logprobs
        micro.temperatures[row, :length] = sample.temperatures
        micro.advantages[row, :length] = advantages_B[row]
        micro.versions[row, :length] = sample.versions
    if not np.isfinite(micro.old_logprobs).all():
        np.nan_to_num(micro.old_logprobs, copy=False, nan=0.0)
    micro.loss_mask[:, 0] = False  # nothing precedes the first token
    return micro
