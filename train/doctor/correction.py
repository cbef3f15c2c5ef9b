"""The check `correction`: whether tokens that other weights sampled are weighted as they should be.
Pure."""

from __future__ import annotations

from math import log, pi, sqrt
from statistics import NormalDist

from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.check import Check, Fault, check_of
from rollbook.train.doctor.recorded import Recorded

REJECTING = {"icepop": "tokens", "sequence_mask_tis": "samples", "mis": "samples"}
"""Correction that rejects -> what it rejects."""
TRUNCATING = frozenset({"tis", "sequence_tis"})


def correction(config: TrainConfig, recorded: Recorded | None, source: str) -> list[Check]:
    """Whether ratios and their correction suit the allowed age of samples and the recorded gap."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GroupPolicyGradient):
        return []
    limit = config.recipe.max_staleness
    others = (source == "tail" and limit is None) or bool(limit)
    summary = f"{algorithm.surrogate} with ratios to the {algorithm.old}'s logprobs"
    if algorithm.surrogate == "reinforce":
        summary = "reinforce, without ratios"
    faults = _ratios(algorithm, others=others)
    if algorithm.correction != "none":
        more, bounds_faults = _bounds(algorithm, recorded)
        summary, faults = summary + more, faults + bounds_faults
    return [check_of("correction", summary, faults)]


def _ratios(algorithm: GroupPolicyGradient, *, others: bool) -> list[Fault]:
    """What is wrong with the policy that ratios are taken to.

    Args:
        others: whether samples may be of earlier versions.
    """
    steps, corrected = algorithm.demand.steps, algorithm.correction != "none"
    if algorithm.surrogate == "reinforce":
        if steps > 1:
            text = f"{steps} steps on each batch, of which only the first is of the policy that sampled it"
            return [Fault("yellow", text, 'algorithm.surrogate = "ppo_clip", or one step on each batch')]
        if others and not corrected:
            text = "samples of older versions count as if this one had sampled them"
            lever = 'algorithm.surrogate = "ppo_clip"; algorithm.old = "trainer" with algorithm.correction'
            return [Fault("yellow", text, lever)]
        return []
    if algorithm.old == "engine" and steps > 1:
        text = (
            f"{steps} steps on each batch: the clips take the difference of engine and trainer for a change "
            "that these steps made"
        )
        return [Fault("yellow", text, 'algorithm.old = "trainer"')]
    if algorithm.old == "trainer" and others and not corrected:
        text = "nothing weighs samples of older versions by how likely they still are"
        return [Fault("yellow", text, 'algorithm.correction = "tis", or algorithm.old = "engine"')]
    return []


def _bounds(algorithm: GroupPolicyGradient, recorded: Recorded | None) -> tuple[str, list[Fault]]:
    """How much of the tokens or samples a correction's bounds leave, in words; and what is wrong
    with them."""
    name, low, high = algorithm.correction, algorithm.correction_low, algorithm.correction_high
    summary = f"; {name}, {low:g} to {high:g}"
    lever = "algorithm.correction_low, algorithm.correction_high"
    if name in TRUNCATING and not low <= 1 <= high:
        text = "a ratio of 1, where engine and trainer agree, is outside the bounds and becomes one of them"
        return summary, [Fault("yellow", text, lever)]
    if name not in REJECTING:
        return summary, []
    gap = None if recorded is None else recorded.gap
    share = kept_share(algorithm, gap or 0.0, 1.0 if recorded is None else recorded.mean_trained)
    at = "if engine and trainer agree: no step has measured that yet" if gap is None else ""
    summary += (
        f", keeps about {share:.0%} of {REJECTING[name]} {at or f'at the gap of {gap:.3g} last recorded'}"
    )
    if share < 0.1:
        return summary, [Fault("red", "nearly nothing is left to learn from", lever)]
    if share < 0.5:
        return summary, [Fault("yellow", "most are rejected", lever)]
    return summary, []


def kept_share(algorithm: GroupPolicyGradient, gap: float, length: float) -> float:
    """The share of tokens or samples within a correction's bounds, if the log-ratios of tokens are
    normally distributed around 0.

    Args:
        gap: mean absolute log-ratio of a token; length: tokens of a sample.
    """
    low, high = algorithm.correction_low, algorithm.correction_high
    deviation = gap * sqrt(pi / 2)
    if algorithm.correction == "mis":
        deviation *= sqrt(length)
    elif algorithm.correction == "sequence_mask_tis":
        deviation /= sqrt(length)
    if not deviation:
        return float(low <= 1 <= high)
    normal = NormalDist(0, deviation)
    return normal.cdf(log(high)) - (normal.cdf(log(low)) if low else 0.0)
