"""Normalizers: how token losses become the loss of a batch, whatever its micro-batches. Pure torch.

The loss is a sum over micro-batches, divided by a number that belongs to the whole batch. Names
follow verl's `agg_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole batch: trained tokens, and samples that have one."""

    tokens: int
    samples: int


def summed(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens; `losses` [B, T - 1] is 0 outside the mask."""
    return losses.sum()


def summed_means(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum over samples of the mean over a sample's tokens."""
    return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).sum()


@dataclass(frozen=True, slots=True)
class Normalizer:
    """What is summed over micro-batches, and what the sum is divided by, given a constant length."""

    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    divisor: Callable[[Totals, int], int]


NORMALIZERS: Mapping[str, Normalizer] = {
    # DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 8.
    "token_mean": Normalizer(summed, lambda totals, length: totals.tokens),
    # GRPO as published, Shao et al. 2024 (arXiv:2402.03300), equation 3.
    "sequence_mean": Normalizer(summed_means, lambda totals, length: totals.samples),
    # RLOO and REINFORCE: a sample's loss is the sum over its tokens.
    "sequence_sum": Normalizer(summed, lambda totals, length: totals.samples),
    # Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783): divided by a length that is the same for every sample.
    "constant": Normalizer(summed, lambda totals, length: totals.samples * length),
}
