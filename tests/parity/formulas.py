"""Formulas that no peer has, written from their papers in another way than ours; ours are held against
them."""

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
    sums = [(values * case.floats).sum(-1) for values in (case.logprobs - case.reference, -case.logprobs)]
    chosen, rejected = _pairs(sums[0])
    lengths = _pairs(case.floats.sum(-1))[0]
    losses = torch.nn.functional.softplus(-beta * (chosen - rejected))
    return (losses + weight * _pairs(sums[1])[0] / lengths).mean()


def sum_to_zero(case: Case, weight: float) -> torch.Tensor:
    """mean log(1 + exp(-(r_chosen - r_rejected))) + weight (mean of all r)^2.

    Source: Hong et al. 2025 (arXiv:2505.07271). Rewards are the samples' first values.
    """
    chosen, rejected = _pairs(case.values[:, 0])
    mean = torch.cat([chosen, rejected]).mean()
    return torch.nn.functional.softplus(rejected - chosen).mean() + weight * mean**2


def uncertain(case: Case) -> torch.Tensor:
    """mean of -log of the integral of sigma(z) over z of N(m_chosen - m_rejected, s_chosen^2 + s_rejected^2).

    Source: PURM, Sun et al. 2025 (arXiv:2503.22480). Means are the samples' first values, logarithms of
    deviations the last ones. The integral is also the mean of the normal distribution's function at
    m_chosen - m_rejected - l, over logistic noise l, which a fine grid takes.
    """
    means, logs = _pairs(case.values[:, 0].double()), _pairs(case.values[:, -1].double())
    deviation = (logs[0].mul(2).exp() + logs[1].mul(2).exp()).sqrt()[:, None]
    noise = torch.linspace(-50, 50, 200_001, dtype=torch.float64)
    density = torch.sigmoid(noise) * torch.sigmoid(-noise)
    below = torch.special.ndtr(((means[0] - means[1])[:, None] - noise) / deviation)
    return -torch.trapezoid(below * density, noise).log().mean().to(case.values.dtype)


def turn_returns(case: Case, discount: float) -> torch.Tensor:
    """The discounted sum of what follows, [B, T]: a turn is one step; a plain loop over tokens.

    Source: Sutton and Barto 2018, equation 3.8.
    """
    result = torch.zeros_like(case.old)
    for row, turns in enumerate(case.turns.tolist()):
        trained = [t for t in range(len(turns)) if case.mask[row, t]]
        for t in trained:
            total = discount ** (turns[trained[-1]] - turns[t]) * float(case.rewards[row])
            for later in trained:
                if later >= t:
                    total += discount ** (turns[later] - turns[t]) * float(case.turn_rewards[row, later])
            result[row, t] = total
    return result


def temperature(case: Case) -> torch.Tensor:
    """The temperature whose mean loss log(1 + exp(-gap / T)) is least, by bisection of its derivative.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 4.2.
    """
    low, high = -7.0, 7.0
    for _ in range(60):
        at = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        torch.nn.functional.softplus(-case.gaps * (-at).exp()).mean().backward()
        assert at.grad is not None
        low, high = (float(at), high) if at.grad < 0 else (low, float(at))
    result = torch.tensor((low + high) / 2, dtype=torch.float64).exp()
    return torch.where((result > 1.001e-3) & (result < 0.999e3), result, 0.0).to(case.old.dtype)


def aged(case: Case, decay: float) -> torch.Tensor:
    """The decay to the power of each token's age, [B, T]; 1 where its version is not known."""
    result = torch.zeros_like(case.old)
    for row, column in case.mask.nonzero().tolist():
        version = int(case.versions[row, column])
        result[row, column] = 1.0 if version < 0 else decay ** (case.mask.shape[1] - version)
    return result
