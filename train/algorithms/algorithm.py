"""The interface of an algorithm: its configuration, the data that it needs, advantages and loss.

A new algorithm is a module beside this one and a line in `registry`. No other code depends on an algorithm's
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rollbook.train.algorithms.advantages import Floats
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.table import Table

if TYPE_CHECKING:
    import torch

Need = Literal["logprobs", "rewards", "groups"]
"""Data that an algorithm may need of each sample: logprob and version of each trained token, a reward, a
group."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a loss is computed from; every tensor is [B, T - 1], where position t is about token t + 1.

    Attributes:
        logprobs: float32, of the weights in training; carries the gradient.
        old_logprobs: float32, of the engine that sampled the token; 0 where it gave none.
        advantages: float32, of the token's sample.
        mask: bool; true where the token is trained. The loss of other tokens is left out afterwards.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of groups that a step uses, and of trajectories per group. A sample without a group counts as a
    group of one."""

    groups: int
    group_size: int = 1


class Algorithm(Table):
    """An algorithm with its configuration. Subclasses have a `name`, a literal, as their first key."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What a sample must have to be trained on."""
    epochs: ClassVar[bool] = False
    """Whether the samples of a cut are used in repeated epochs; if not, each is used once."""

    @property
    def algorithm_name(self) -> str:
        """Its name in a CONFIG and in a manifest."""
        return str(self.model_dump()["name"])

    @property
    def demand(self) -> Demand:
        """How many groups and trajectories a step uses."""
        raise NotImplementedError

    def advantages(self, rewards: Floats, groups: Sequence[str], trajectories: Sequence[str]) -> Floats:
        """Advantage of each of N samples, float64 [N].

        Args:
            rewards: float64 [N]; NaN where a sample has none.
            groups, trajectories: of each sample, by name.
        """
        raise NotImplementedError

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """Loss of each token, float32 [B, T - 1]."""
        raise NotImplementedError

    def add(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum of a micro-batch's losses [B, T - 1], which are 0 outside the mask."""
        return losses.sum()

    def divisor(self, totals: Totals) -> int:
        """What the sum over all micro-batches is divided by: by default, the batch's trained tokens."""
        return totals.tokens
