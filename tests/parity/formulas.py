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


def _log_ratios(case: Case, *, mean: bool) -> torch.Tensor:
    """log(policy / reference) of each sample, summed or averaged over its tokens, [B]."""
    sums = ((case.logprobs - case.reference) * case.floats).sum(-1)
    return sums / case.floats.sum(-1) if mean else sums


def dpo(case: Case, beta: float = 0.1) -> torch.Tensor:
    """mean log(1 + exp(-beta (h_chosen - h_rejected))), h = log(policy / reference).

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7.
    """
    chosen, rejected = _pairs(_log_ratios(case, mean=False))
    return torch.nn.functional.softplus(-beta * (chosen - rejected)).mean()


def ipo(case: Case, beta: float = 0.1, *, mean: bool = False) -> torch.Tensor:
    """mean (h_chosen - h_rejected - 1 / (2 beta))^2.

    Source: Azar et al. 2023 (arXiv:2310.12036), equation 17. `mean`: h is a mean over tokens.
    """
    chosen, rejected = _pairs(_log_ratios(case, mean=mean))
    return (chosen - rejected - 1 / (2 * beta)).square().mean()


def bradley_terry(case: Case, *, margin: bool = False) -> torch.Tensor:
    """mean log(1 + exp(-(r_chosen - r_rejected - margin))).

    Source: Llama 2, Touvron et al. 2023 (arXiv:2307.09288), equation 2. Rewards are the samples' first
    values, margins the absolute values of the first returns.
    """
    chosen, rejected = _pairs(case.values[:, 0])
    margins = _pairs(case.returns[:, 0].abs())[0] if margin else 0.0
    return torch.nn.functional.softplus(-(chosen - rejected - margins)).mean()
