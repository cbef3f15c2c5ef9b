"""Formulas of losses that we do not have yet, written from their papers; peers are held against them.

Where one of these becomes ours, the row takes ours in its place.
"""

from __future__ import annotations

import torch
from parity.cases import Case


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of the first half and of the second; the last is left out of an odd number."""
    n = len(values) // 2
    return values[:n], values[n : 2 * n]


def rpo(case: Case, beta: float = 0.1, weight: float = 1.0) -> torch.Tensor:
    """DPO's loss plus `weight` times the mean cross-entropy of the chosen sample's tokens.

    Source: Pang et al. 2024, "Iterative Reasoning Preference Optimization" (arXiv:2404.19733), equation 2.
    """
    sums = [(of * case.floats).sum(-1) for of in (case.logprobs - case.reference, -case.logprobs)]
    chosen, rejected = _pairs(sums[0])
    lengths = _pairs(case.floats.sum(-1))[0]
    losses = torch.nn.functional.softplus(-beta * (chosen - rejected))
    return (losses + weight * _pairs(sums[1])[0] / lengths).mean()


def bradley_terry(case: Case, *, margin: bool = False) -> torch.Tensor:
    """mean log(1 + exp(-(r_chosen - r_rejected - margin))).

    Source: Llama 2, Touvron et al. 2023 (arXiv:2307.09288), equation 2. Rewards are the samples' first
    values, margins the absolute values of the first returns.
    """
    chosen, rejected = _pairs(case.values[:, 0])
    margins = _pairs(case.returns[:, 0].abs())[0] if margin else 0.0
    return torch.nn.functional.softplus(-(chosen - rejected - margins)).mean()
