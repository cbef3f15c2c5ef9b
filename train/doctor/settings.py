"""Checks of a configuration's settings, on their own and against what was recorded. Pure."""

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


def batch(config: TrainConfig, recorded: Recorded | None, source: str) -> Check:
    """Whether a batch is large enough to learn from, and its groups as large as those recorded."""
    demand, algorithm = config.algorithm.demand, config.algorithm
    size = demand.groups * demand.group_size
    if "pairs" in algorithm.needs:
        return Check("batch", "green", f"{demand.groups} pairs a step")
    steps = "one step" if demand.steps == 1 else f"{demand.steps} steps"
    summary = f"{size} trajectories a rollout batch, in {demand.groups} groups; {steps} on each"
    faults = []
    if "groups" in algorithm.needs:
        largest = 0 if recorded is None else recorded.largest_group
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
    return check_of("batch", summary, faults)


def normalization(config: TrainConfig, recorded: Recorded | None) -> list[Check]:
    """Whether advantages come out at about unit size, and losses are divided by the right number."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GroupPolicyGradient):
        return []
    faults = [*_comparison(algorithm)]
    if recorded is not None and recorded.rewards.finite:
        faults += _scale(algorithm, recorded)
    if algorithm.normalizer == "constant" and recorded is not None:
        longest = recorded.longest_trained
        if algorithm.constant_length < longest:
            text = (
                f"constant_length {algorithm.constant_length} is less than the {longest} trained tokens of "
                "the longest sample, which weighs more than one sample"
            )
            faults.append(Fault("yellow", text, "algorithm.constant_length"))
    keys = ("baseline", "deviation", "whitening", "reward_normalization", "normalizer")
    summary = ", ".join(f"{key} {getattr(algorithm, key)}" for key in keys)
    return [check_of("normalization", summary, faults)]


def _comparison(algorithm: GroupPolicyGradient) -> list[Fault]:
    """Faults in what rewards are compared with and divided by."""
    compared = (algorithm.baseline, algorithm.whitening, algorithm.reward_normalization)
    if compared == ("none", "none", "none") and "values" not in algorithm.needs:
        text = "rewards are compared with nothing: each one above 0 makes its tokens likelier, good or bad"
        return [Fault("yellow", text, "algorithm.baseline; algorithm.whitening")]
    if algorithm.deviation != "none" and algorithm.whitening in ("unbiased", "biased"):
        text = "advantages are divided by their group's deviation, and again by the batch's"
        return [Fault("yellow", text, 'algorithm.deviation = "none", or algorithm.whitening = "none"')]
    return []


def _scale(algorithm: GroupPolicyGradient, recorded: Recorded) -> list[Fault]:
    """Whether the algorithm can use recorded rewards of this size."""
    rewards, faults = recorded.rewards, []
    normalized = algorithm.reward_normalization != "none"
    divided = algorithm.deviation != "none" or algorithm.whitening in ("unbiased", "biased")
    by_itself = "values" in algorithm.needs or not divided  # a critic's targets are rewards as they are
    bounds = None if normalized else algorithm.reward_clip
    if bounds is not None and (rewards.least >= bounds[1] or rewards.greatest <= bounds[0]):
        text = f"reward_clip {list(bounds)} makes all rewards equal: they are {_range(recorded)}"
        return [Fault("red", text, "algorithm.reward_clip")]
    if bounds is not None and not bounds[0] <= rewards.mean <= bounds[1]:
        text = f"reward_clip {list(bounds)} cuts most rewards off: they are {_range(recorded)}"
        faults.append(Fault("yellow", text, "algorithm.reward_clip"))
    spread = rewards.deviation if bounds is None else min(rewards.deviation, bounds[1] - bounds[0])
    if by_itself and not normalized and spread and not SMALL <= spread <= LARGE:
        text = f"rewards deviate by {spread:.3g}, far from 1, and nothing divides them by that"
        faults.append(Fault("yellow", text, 'algorithm.reward_normalization = "running"'))
    return faults


def _range(recorded: Recorded) -> str:
    return f"{recorded.rewards.least:.4g} to {recorded.rewards.greatest:.4g}"


def kl_control(config: TrainConfig, recorded: Recorded | None) -> list[Check]:
    """Whether the reference exists, or else what shows that a policy drifts from its beginning."""
    algorithm, reference = config.algorithm, config.algorithm.reference
    if reference is not None:
        weights = ""
        faults = _reference(config, recorded, reference)
        if isinstance(algorithm, GroupPolicyGradient):
            weights = f", weight {algorithm.kl:g} in the loss and {algorithm.reward_kl:g} in the reward"
            faults += _estimate(algorithm)
        return [check_of("kl", f"held to version {reference}{weights}", faults)]
    if "rewards" not in algorithm.needs or algorithm.head_width:
        return []
    watching = [r.metric for r in config.stop if r.metric in DRIFT or r.of_evaluations]
    summary = f"no KL term over {config.steps} steps; most trainings do without one"
    if watching:
        return [Check("kl", "green", f"{summary}, and a [[stop]] rule watches {', '.join(watching)}")]
    faults = []
    if config.steps >= MANY_STEPS:
        text = "over so many a policy may drift far, and no [[stop]] rule watches it"
        faults.append(
            Fault("yellow", text, "a [[stop]] on old_kl, entropy or evaluation.reward; algorithm.kl")
        )
    return [check_of("kl", summary, faults)]


def _reference(config: TrainConfig, recorded: Recorded | None, version: int) -> list[Fault]:
    """Whether there is a checkpoint of the reference; version 0 is written when a run begins."""
    if recorded is None or (version == 0 and not recorded.checkpoints):
        return []
    if recorded.checkpoints.get(version):
        return []
    there = ", ".join(str(v) for v, held in sorted(recorded.checkpoints.items()) if held) or "none"
    lost = (
        "whose checkpoint is gone" if version in recorded.checkpoints else "of which there is no checkpoint"
    )
    text = f"{lost} (of policy {config.policy!r} there are: {there})"
    return [Fault("red", text, "algorithm.reference_version")]


def _estimate(algorithm: GroupPolicyGradient) -> list[Fault]:
    """Faults in how the KL terms act."""
    faults = []
    if algorithm.kl and algorithm.kl_estimator == "k1":
        text = "k1 in the loss has a gradient of 0 on average, so it holds nothing"
        faults.append(Fault("yellow", text, 'algorithm.kl_estimator = "k3", or algorithm.reward_kl'))
    if algorithm.kl and algorithm.reward_kl:
        text = "the divergence counts twice, in the loss and in the reward"
        faults.append(Fault("yellow", text, "algorithm.kl or algorithm.reward_kl"))
    return faults


def staleness(config: TrainConfig, source: str) -> Check:
    """Whether samples will be as fresh as the recipe requires."""
    limit, steps = config.recipe.max_staleness, config.algorithm.demand.steps
    if source == "tail" and limit is None:
        summary = (
            "nothing limits how old samples are, and nothing holds back trajectories that will be too old"
        )
        return Check("staleness", "yellow", summary, "recipe.max_staleness")
    if limit is not None and limit < steps - 1:
        summary = (
            f"max_staleness {limit} is less than the {steps} versions that one rollout batch makes: what is "
            "sampled meanwhile is too old"
        )
        return Check("staleness", "red" if source == "tail" else "yellow", summary, "recipe.max_staleness")
    return Check("staleness", "green", f"max_staleness {'is not set' if limit is None else limit}")
