"""Regularizers: what is added to the loss of each token beside the surrogate. Pure torch.

The estimates of KL(policy || reference) from one sampled token are those of Schulman 2020, "Approximating KL
Divergence" (joschu.net/blog/kl-approx.html), with d = logprob - reference logprob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_DIFFERENCE = 20.0
LARGEST_K3 = 10.0
"""verl clamps d to +-20, and k3 to +-10."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    """d: unbiased. Its own gradient is zero on average, so it belongs in the reward, not in the loss."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, yet its gradient is that of the KL divergence on policy."""
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; GRPO's (arXiv:2402.03300), equation 4."""
    bounded = difference.clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    return ((-bounded).exp() - 1 + bounded).clamp(-LARGEST_K3, LARGEST_K3)


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> d [B, T - 1] -> the estimate [B, T - 1]."""
