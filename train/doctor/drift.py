"""Signs that a policy went far from where it began, or got worse at what is held out of its training. Pure.

See `train.doctor.signs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from rollbook.train.doctor.evidence import Course, Finding

FAR: Mapping[str, float] = {"kl": 10.0, "old_kl": 1.0}
"""KL -> nats a token above which it has exploded, if it also grew tenfold. A healthy one from a reference is
below 1, also where rejected samples become unlikely by dpo; from the policy that ratios are taken to, far
below 0.1."""
LESS_LIKELY = 0.5
"""Nats that a token of chosen samples may lose, on average: then it has three fifths of its probability."""


def kl_explosion(course: Course) -> Finding | None:
    """At the end the KL from the reference is above 10 nats a token, or that from the policy which ratios are
    taken to above 1, and ten times what it was at first."""
    for metric, bound in FAR.items():
        ends = course.ends(metric)
        if ends is None or ends[1] <= max(bound, 10 * ends[0]):
            continue
        whose = "the reference" if metric == "kl" else "the policy that ratios are taken to"
        return Finding(
            "kl_explosion",
            f"the KL from {whose} ({metric}) grew from {ends[0]:.3g} to {ends[1]:.3g} nats a token: little "
            "is left of what the policy was",
            course.whole(),
            {"metric": metric, "first": ends[0], "last": ends[1]},
            course.training.metrics("kl", "old_kl", "loss", "gradient_norm"),
            ("optimizer.lr", "algorithm.kl", "algorithm.beta", "optimizer.clip_grad", "fewer steps"),
        )
    return None


def chosen_less_likely(course: Course) -> Finding | None:
    """At the end a token of chosen samples is less likely than under the reference by half a nat, on
    average: the margin grows because rejected samples fall faster, and the policy says neither."""
    ends = course.ends("chosen_logratio")
    if ends is None or ends[1] >= -LESS_LIKELY:
        return None
    return Finding(
        "chosen_less_likely",
        f"a token of chosen samples lost {-ends[1]:.3g} nats against the reference, {-ends[0]:.3g} at first: "
        "what is preferred becomes unlikely too",
        course.whole(),
        {"first": ends[0], "last": ends[1]},
        course.training.metrics("chosen_logratio", "preference_accuracy", "preference_margin", "loss"),
        ("algorithm.sft_weight", "algorithm.beta (greater)", "optimizer.lr", "fewer steps"),
    )


def falling_evaluations(course: Course) -> Finding | None:
    """The reward of evaluations fell from its best by a tenth of that and by twice the standard error of the
    difference, in a training whose own reward did not rise, or that has none."""
    rewards = course.ends("reward")
    if len(course.held_out) < 2 or (rewards is not None and rewards[1] > rewards[0]):
        return None
    best = max(course.held_out, key=lambda version: course.held_out[version].mean)
    then, now = course.held_out[best], course.held_out[max(course.held_out)]
    if then.mean - now.mean <= max(0.1 * abs(then.mean), 2 * sqrt(then.variance + now.variance)):
        return None
    return Finding(
        "falling_evaluations",
        f"the reward of evaluations fell from {then.mean:.3g} at version {best} to {now.mean:.3g}",
        course.whole(),
        {
            "evaluation": [course.held_out[version].mean for version in sorted(course.held_out)],
            "best_version": best,
        },
        course.training.held_out(),
        ("optimizer.lr", "algorithm.kl", "algorithm.beta", "fewer steps"),
    )


def partial_evaluations(course: Course) -> Finding | None:
    """An evaluation is not whole: its reward is that of the trajectories that came to an end."""
    if not course.partial:
        return None
    said = [
        f"{trajectories}{'' if expected is None else f' of {expected}'} trajectories at version {version}"
        for version, (trajectories, expected) in sorted(course.partial.items())
    ]
    return Finding(
        "partial_evaluations",
        f"NOT WHOLE, and compared with no other: {'; '.join(said[:5])}",
        None,
        {"versions": sorted(course.partial)},
        course.training.partial_evaluations(),
        ("evaluation.wait_s", "the launches that failed", "rollouts' retries.attempts"),
    )
