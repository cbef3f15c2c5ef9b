"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from rollbook.store.config import Positive
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

if TYPE_CHECKING:
    import torch


class Sft(Algorithm):
    """Supervised fine-tuning: cross-entropy on the recorded completions."""

    name: Literal["sft"]
    """The algorithm that the other keys of the table belong to."""
    batch_size: Positive = 64
    """Samples per step."""

    @property
    def cycles(self) -> bool:
        """It goes over its samples again and again."""
        return True

    @property
    def demand(self) -> Demand:
        """A step uses `batch_size` samples, each as a group of one."""
        return Demand(self.batch_size)

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """1 for every sample: all have the same weight."""
        return Advantages(np.ones(len(rollouts.rewards), np.float64))

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """Cross-entropy of the recorded token."""
        return -inputs.logprobs
