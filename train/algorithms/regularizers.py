"""Regularizers: what is added to the loss of each token beside the surrogate. Pure torch.

The estimates of KL(policy || reference) from one sampled token are those of Schulman 2020, "Approximating KL
Divergence" (joschu.net/blog/kl-approx.html), with d = logprob - reference logprob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from rollbook.train.algorithms.parts import part
from rollbook.train.algorithms.shapes import called

if TYPE_CHECKING:
    import torch

KlBound = Literal["k3", "all", "none"]
"""Which estimates are kept within +-10."""
LARGEST_DIFFERENCE = 20.0
LARGEST_ESTIMATE = 10.0
"""verl clamps d to +-20 and k3 to +-10; OpenRLHF and AReaL clamp every estimate to +-10; TRL clamps none."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    """d: unbiased. Its own gradient is zero on average, so it belongs in the reward, not in the loss."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, yet its gradient is that of the KL divergence on policy."""
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; GRPO's (arXiv:2402.03300), equation 4."""
    bounded = difference.clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    return unbounded_k3(bounded).clamp(-LARGEST_ESTIMATE, LARGEST_ESTIMATE)


def unbounded_k3(difference: torch.Tensor) -> torch.Tensor:
    """The same, whatever d is."""
    return (-difference).exp() - 1 + difference


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> d [B, T - 1] -> the estimate [B, T - 1]."""


def estimate(estimator: str, bound: KlBound, difference: torch.Tensor) -> torch.Tensor:
    """What an estimator, which may be one's own, makes of each token's difference, [B, T - 1].

    Raises:
        TrainError: it gives another shape.
    """
    if (estimator, bound) == ("k3", "none"):
        return unbounded_k3(difference)
    of = part(KL_ESTIMATORS, estimator)
    found = called("kl_estimator", estimator, of, tuple(difference.shape), difference)
    return found.clamp(-LARGEST_ESTIMATE, LARGEST_ESTIMATE) if bound == "all" else found
