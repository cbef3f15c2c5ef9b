"""Importance-sampling corrections: token weights where the trainer's policy is not exactly the one
that sampled the tokens. Pure numpy.

An engine and a trainer compute the same weights' probabilities with different kernels, and an
agent's tokens may be older than the step. With w = exp(old - rollout), the ratio of the
trainer's probability of a token before the step to the engine's, a correction gives each token a
weight; 0 rejects it. Tokens of samples lie one after the other, [P]. Log-ratios are clamped to
+-20, as in verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rollbook.train.algorithms.returns import of_tokens
from rollbook.train.algorithms.rollouts import Floats, Ints

LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the greatest value that a ratio may have."""

    low: float
    high: float


def token_truncated(log_ratios: Floats, lengths: Ints, bounds: Bounds) -> Floats:
    """min(w, high) of each token: truncated importance sampling (TIS). `low` is a lower bound; 0
    means none.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training". verl, OpenRLHF and slime (whose bounds are both used) have it.
    """
    return _ratios(log_ratios).clip(bounds.low, bounds.high)


def token_masked(log_ratios: Floats, lengths: Ints, bounds: Bounds) -> Floats:
    """w where low <= w <= high, else 0: IcePop. Source: Ring-1T, Ling Team 2025 (arXiv:2510.18855)."""
    ratios = _ratios(log_ratios)
    return np.where((ratios >= bounds.low) & (ratios <= bounds.high), ratios, 0.0)


def sequence_truncated(log_ratios: Floats, lengths: Ints, bounds: Bounds) -> Floats:
    """The product of a sample's w, bounded as in `token_truncated`, for each of its tokens.

    Source: verl's `rollout_is = "sequence"`.
    """
    return of_tokens(_ratios(_sums(log_ratios, lengths)), lengths).clip(bounds.low, bounds.high)


def sequence_masked(log_ratios: Floats, lengths: Ints, bounds: Bounds) -> Floats:
    """The product of a sample's w where it is within the bounds, else 0: masked importance sampling
    (MIS) of whole samples.

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch".
    """
    product = _ratios(_sums(log_ratios, lengths))
    kept = (product >= bounds.low) & (product <= bounds.high)
    return of_tokens(np.where(kept, product, 0.0), lengths)


def geometric_masked(log_ratios: Floats, lengths: Ints, bounds: Bounds) -> Floats:
    """w of each token of samples whose geometric mean of w is within the bounds, else 0: sequence-masked TIS.

    Tokens that are kept have their own w, unbounded, as in OpenRLHF's `seq-mask-tis`.
    """
    mean = np.exp(_sums(log_ratios, lengths) / np.maximum(lengths, 1))
    kept = of_tokens((mean >= bounds.low) & (mean <= bounds.high), lengths)
    return np.where(kept, _ratios(log_ratios), 0.0)


CORRECTIONS: Mapping[str, Callable[[Floats, Ints, Bounds], Floats]] = {
    "tis": token_truncated,
    "icepop": token_masked,
    "sequence_tis": sequence_truncated,
    "sequence_mask_tis": geometric_masked,
    "mis": sequence_masked,
}
"""Name -> (log-ratios [P], lengths [N], bounds) -> weights [P]."""


def _ratios(log_ratios: Floats) -> Floats:
    return np.exp(log_ratios.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def _sums(values: Floats, lengths: Ints) -> Floats:
    """Sums of each sample's tokens, [N]."""
    samples = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(samples, values, len(lengths)).astype(np.float64)
