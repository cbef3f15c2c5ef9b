"""Checks of a configuration's settings, by themselves and against what was recorded. Pure."""

from __future__ import annotations

from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.check import Check, Fault, Verdict, check_of
from rollbook.train.doctor.recorded import Recorded

MANY_STEPS = 500
"""Steps from which on a policy that nothing holds is worth a look."""
SMALL, LARGE = 0.1, 10.0
"""Bounds of a deviation of rewards that needs no normalization."""
DRIFT = frozenset({"old_kl", "entropy", "ratio_max", "length_mean"})
"""Metrics of steps that show a policy drifting away."""


def batch(config: TrainConfig, seen: Recorded | None, source: str) -> Check:
    """Whether a batch is large enough to learn from, and its groups as large as those recorded."""
    demand, algorithm = config.algorithm.demand, config.algorithm
    size = demand.groups * demand.group_size
    if "pairs" in algorithm.needs:
        return Check("batch", "green", f"{demand.groups} pairs a step")
    steps = "one step" if demand.steps == 1 else f"{demand.steps} steps"
    said = f"{size} trajectories a rollout batch, in {demand.groups} groups; {steps} on each"
    faults = []
    if "groups" in algorithm.needs:
        largest = 0 if seen is None else seen.largest_group
        if 0 < largest < demand.group_size:
            text = (
                f"the largest group recorded has {largest} trajectories, where {demand.group_size} are asked"
            )
            verdict: Verdict = "red" if source == "cut" else "yellow"
            faults.append(Fault(verdict, text, "algorithm.group_size"))
        if demand.group_size < 4:
            text = f"groups of {demand.group_size}: a baseline of so few says little"
            faults.append(Fault("yellow", text, "algorithm.group_size"))
    if "values" not in algorithm.needs and not algorithm.cycles and size < 8:
        faults.append(Fault("yellow", "gradients of so few are noise", "algorithm.groups"))
    if demand.mini_batches > size:
        text = f"{demand.mini_batches} mini-batches share {size} trajectories"
        faults.append(Fault("yellow", text, "algorithm.mini_batches"))
    return check_of("batch", said, faults)


def normalization(config: TrainConfig, seen: Recorded | None) -> list[Check]:
    """Whether rewards become advantages of about unit size, and losses are divided by what they should be."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GroupPolicyGradient):
        return []
    faults = [*_comparison(algorithm)]
    if seen is not None and seen.rewards.finite:
        faults += _scale(algorithm, seen)
    if algorithm.normalizer == "constant" and seen is not None:
        longest = seen.longest_trained
        if algorithm.constant_length < longest:
            text = (
                f"constant_length {algorithm.constant_length} is less than the {longest} trained tokens of "
                "the longest sample, which weighs more than one sample"
            )
            faults.append(Fault("yellow", text, "algorithm.constant_length"))
    keys = ("baseline", "deviation", "whitening", "reward_normalization", "normalizer")
    said = ", ".join(f"{key} {getattr(algorithm, key)}" for key in keys)
    return [check_of("normalization", said, faults)]


def _comparison(algorithm: GroupPolicyGradient) -> list[Fault]:
    """What rewards are compared with."""
    compared = (algorithm.baseline, algorithm.whitening, algorithm.reward_normalization)
    if compared == ("none", "none", "none") and "values" not in algorithm.needs:
        text = "rewards are compared with nothing: each one above 0 makes its tokens likelier, good or bad"
        return [Fault("yellow", text, "algorithm.baseline; algorithm.whitening")]
    if algorithm.deviation != "none" and algorithm.whitening in ("unbiased", "biased"):
        text = "advantages are divided by their group's deviation, and again by the batch's"
        return [Fault("yellow", text, 'algorithm.deviation = "none", or algorithm.whitening = "none"')]
    return []


def _scale(algorithm: GroupPolicyGradient, seen: Recorded) -> list[Fault]:
    """Whether the recorded rewards are of a size that the algorithm can use."""
    rewards, faults = seen.rewards, []
    normalized = algorithm.reward_normalization != "none"
    divided = algorithm.deviation != "none" or algorithm.whitening in ("unbiased", "biased")
    by_itself = "values" in algorithm.needs or not divided  # a critic's targets are rewards as they are
    bounds = None if normalized else algorithm.reward_clip
    if bounds is not None and (rewards.least >= bounds[1] or rewards.greatest <= bounds[0]):
        text = f"reward_clip {list(bounds)} makes all rewards equal: they are {_range(seen)}"
        return [Fault("red", text, "algorithm.reward_clip")]
    if bounds is not None and not bounds[0] <= rewards.mean <= bounds[1]:
        text = f"reward_clip {list(bounds)} cuts most rewards off: they are {_range(seen)}"
        faults.append(Fault("yellow", text, "algorithm.reward_clip"))
    spread = rewards.deviation if bounds is None else min(rewards.deviation, bounds[1] - bounds[0])
    if by_itself and not normalized and spread and not SMALL <= spread <= LARGE:
        text = f"rewards deviate by {spread:.3g}, far from 1, and nothing divides them by that"
        faults.append(Fault("yellow", text, 'algorithm.reward_normalization = "running"'))
    return faults


def _range(seen: Recorded) -> str:
    return f"{seen.rewards.least:.4g} to {seen.rewards.greatest:.4g}"


def kl_control(config: TrainConfig, seen: Recorded | None) -> list[Check]:
    """Whether the reference is there, or what else shows that a policy leaves its beginning."""
    algorithm, reference = config.algorithm, config.algorithm.reference
    if reference is not None:
        weights = ""
        faults = _reference(config, seen, reference)
        if isinstance(algorithm, GroupPolicyGradient):
            weights = f", weight {algorithm.kl:g} in the loss and {algorithm.reward_kl:g} in the reward"
            faults += _estimate(algorithm)
        return [check_of("kl", f"held to version {reference}{weights}", faults)]
    if "rewards" not in algorithm.needs or algorithm.head_width:
        return []
    watching = [r.metric for r in config.stop if r.metric in DRIFT or r.of_evaluations]
    said = f"no KL term over {config.steps} steps; most trainings do without one"
    if watching:
        return [Check("kl", "green", f"{said}, and a [[stop]] rule watches {', '.join(watching)}")]
    faults = []
    if config.steps >= MANY_STEPS:
        text = "over so many a policy may drift far, and no [[stop]] rule watches it"
        faults.append(
            Fault("yellow", text, "a [[stop]] on old_kl, entropy or evaluation.reward; algorithm.kl")
        )
    return [check_of("kl", said, faults)]


def _reference(config: TrainConfig, seen: Recorded | None, version: int) -> list[Fault]:
    """Whether there is a checkpoint of the reference; version 0 is written when a run begins."""
    if seen is None or (version == 0 and not seen.checkpoints):
        return []
    if seen.checkpoints.get(version):
        return []
    there = ", ".join(str(v) for v, held in sorted(seen.checkpoints.items()) if held) or "none"
    lost = "whose checkpoint is gone" if version in seen.checkpoints else "of which there is no checkpoint"
    text = f"{lost} (of policy {config.policy!r} there are: {there})"
    return [Fault("red", text, "algorithm.reference_version")]


def _estimate(algorithm: GroupPolicyGradient) -> list[Fault]:
    """How the divergence acts."""
    faults = []
    if algorithm.kl and algorithm.kl_estimator == "k1":
        text = "k1 in the loss has a gradient of 0 on average, so it holds nothing"
        faults.append(Fault("yellow", text, 'algorithm.kl_estimator = "k3", or algorithm.reward_kl'))
    if algorithm.kl and algorithm.reward_kl:
        text = "the divergence counts twice, in the loss and in the reward"
        faults.append(Fault("yellow", text, "algorithm.kl or algorithm.reward_kl"))
    return faults


def staleness(config: TrainConfig, source: str) -> Check:
    """Whether samples will be as fresh as the recipe asks for."""
    limit, steps = config.recipe.max_staleness, config.algorithm.demand.steps
    if source == "tail" and limit is None:
        said = "nothing limits how old samples are, and nothing holds back trajectories that will be too old"
        return Check("staleness", "yellow", said, "recipe.max_staleness")
    if limit is not None and limit < steps - 1:
        said = (
            f"max_staleness {limit} is less than the {steps} versions that one rollout batch makes: what is "
            "sampled meanwhile is too old"
        )
        return Check("staleness", "red" if source == "tail" else "yellow", said, "recipe.max_staleness")
    return Check("staleness", "green", f"max_staleness {'is not set' if limit is None else limit}")
