"""Signs of the canonical failures of a training: in its learning, in a policy that drifted far from
where it began or got worse on held-out data, and in what failed beside it (steps, syncs, turns,
launches of agents). Pure.

Each sign is a rule over the metrics of the training's steps. It compares the last tenth of the
steps with the first, so that one odd step is no sign; a training of fewer than `FEWEST` steps is
not judged by its course. Thresholds are conventions, stated in each rule; the values compared
with them are in the evidence, so that readers may judge for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from statistics import median

from rollbook.train.doctor.evidence import FEWEST, Finding, TrainingCourse

FAR: Mapping[str, float] = {"kl": 10.0, "old_kl": 1.0}
"""KL -> nats a token above which it has exploded, if it also grew tenfold. A healthy one from a reference is
below 1, also where rejected samples become unlikely by dpo; from the policy that ratios are taken to, far
below 0.1."""
LESS_LIKELY = 0.5
"""Nats that a token of chosen samples may lose, on average: then it has three fifths of its probability."""


def kl_explosion(course: TrainingCourse) -> Finding | None:
    """At the end the KL from the reference is above 10 nats a token, or the KL from the policy that
    ratios are taken to is above 1, and it is ten times what it was at first."""
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


def chosen_less_likely(course: TrainingCourse) -> Finding | None:
    """At the end a token of chosen samples is on average less likely than under the reference by
    half a nat: the margin grows because rejected samples fall faster, and the policy produces
    neither."""
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


def falling_evaluations(course: TrainingCourse) -> Finding | None:
    """The reward of evaluations fell from its best by a tenth of it and by twice the standard error
    of the difference, in a training whose own reward did not rise, or that has none."""
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


def partial_evaluations(course: TrainingCourse) -> Finding | None:
    """An evaluation is not whole: its reward is that of the trajectories that came to an end."""
    if not course.partial:
        return None
    lines = [
        f"{trajectories}{'' if expected is None else f' of {expected}'} trajectories at version {version}"
        for version, (trajectories, expected) in sorted(course.partial.items())
    ]
    return Finding(
        "partial_evaluations",
        f"NOT WHOLE, and compared with no other: {'; '.join(lines[:5])}",
        None,
        {"versions": sorted(course.partial)},
        course.training.partial_evaluations(),
        ("evaluation.wait_s", "the launches that failed", "rollouts' retries.attempts"),
    )


def failed_steps(course: TrainingCourse) -> Finding | None:
    """Attempts at steps failed."""
    if not course.failed:
        return None
    numbers = sorted(course.failed)
    return Finding(
        "failed_steps",
        f"{len(numbers)} steps had attempts that failed; the last: {course.failed[numbers[-1]][:200]}",
        (numbers[0], numbers[-1]),
        {"steps": numbers},
        course.training.failed_steps(),
        ("optimizer.lr", "on_not_finite"),
    )


def failed_syncs(course: TrainingCourse) -> Finding | None:
    """Engines did not get weights that were sent."""
    if not course.syncs:
        return None
    return Finding(
        "failed_syncs",
        f"{len(course.syncs)} syncs failed; the last, of version {course.syncs[-1][0]}: "
        f"{course.syncs[-1][1][:200]}",
        None,
        {"syncs": len(course.syncs), "versions": sorted({version for version, _ in course.syncs})},
        course.training.failed_syncs(),
        ("sync.timeout_s", "sync.transport", "the engine's log"),
    )


def failed_turns(course: TrainingCourse) -> Finding | None:
    """More than one in twenty of the turns that ended since the training began failed, and at least
    three."""
    failed = [turns for turns in course.turns if turns.status == "failed"]
    count, ended = sum(turns.count for turns in failed), sum(turns.count for turns in course.turns)
    if count < 3 or count <= 0.05 * ended:
        return None
    most = "; ".join(f"{turns.count} in lane {turns.lane}: {turns.error[:120]}" for turns in failed[:3])
    others = sum(turns.count for turns in failed[3:])
    return Finding(
        "failed_turns",
        f"{count} of {ended} turns failed since the training began ({count / ended:.0%}). {most}"
        + (f"; {others} others" if others else ""),
        course.whole(),
        {
            "failed": count,
            "ended": ended,
            "errors": [{"lane": t.lane, "error": t.error, "turns": t.count} for t in failed[:10]],
        },
        course.training.ended_turns(),
        ("the engine's log", "the agents' concurrency", "the engine's memory and timeouts"),
    )


def failed_launches(course: TrainingCourse) -> Finding | None:
    """More than one in ten of the launches that ended since the training began failed by their
    infrastructure, and at least three: groups are late, or lack trajectories."""
    failed = [launches for launches in course.launches if launches.by_infrastructure]
    count, ended = (sum(launches.count for launches in group) for group in (failed, course.launches))
    if count < 3 or count <= 0.1 * ended:
        return None
    most = "; ".join(f"{group.count} of rollouts {group.rollout}: {group.why[:120]}" for group in failed[:3])
    return Finding(
        "failed_launches",
        f"{count} of {ended} launches failed by their infrastructure since the training began "
        f"({count / ended:.0%}). {most}",
        course.whole(),
        {
            "failed": count,
            "ended": ended,
            "infra_failed_rate": count / ended,
            "errors": [
                {"rollout": group.rollout, "why": group.why, "launches": group.count} for group in failed[:10]
            ],
        },
        course.training.ended_launches(),
        ("the reasons", "the engine's log", "the rollouts' concurrency and agent.limits"),
    )


def entropy_collapse(course: TrainingCourse) -> Finding | None:
    """The entropy fell to a quarter or less."""
    ends = course.ends("entropy")
    if ends is None or ends[1] > ends[0] / 4:
        return None
    return Finding(
        "entropy_collapse",
        f"entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats: the policy hardly explores any more",
        course.whole(),
        {"first": ends[0], "last": ends[1]},
        course.training.metrics("entropy", "reward"),
        ("algorithm.entropy", "algorithm.clip_high (above clip_low)", "algorithm.kl", "optimizer.lr"),
    )


def length_hacking(course: TrainingCourse) -> Finding | None:
    """Samples became twice as long, while the reward did not improve by a twentieth."""
    lengths, rewards = course.ends("length_mean"), course.ends("reward")
    if lengths is None or rewards is None or lengths[1] < 2 * lengths[0]:
        return None
    if rewards[1] - rewards[0] > 0.05 * max(abs(rewards[0]), 1):
        return None
    return Finding(
        "length_hacking",
        f"samples grew from {lengths[0]:.4g} to {lengths[1]:.4g} trained tokens, the reward from "
        f"{rewards[0]:.3g} to {rewards[1]:.3g}",
        course.whole(),
        {"lengths": list(lengths), "rewards": list(rewards)},
        course.training.metrics("length_mean", "reward", "truncated"),
        ("algorithm.overlong_length", 'algorithm.normalizer = "token_mean" or "constant"', "the reward"),
    )


def reward_hacking(course: TrainingCourse) -> Finding | None:
    """The reward in training rose while that of evaluations fell from its best, by a tenth of it
    and by twice the standard error of the difference."""
    rewards = course.ends("reward")
    if rewards is None or len(course.held_out) < 2 or rewards[1] <= rewards[0]:
        return None
    best = max(course.held_out, key=lambda version: course.held_out[version].mean)
    then, now = course.held_out[best], course.held_out[max(course.held_out)]
    fell = then.mean - now.mean
    if fell <= max(0.1 * abs(then.mean), 2 * sqrt(then.variance + now.variance)):
        return None
    return Finding(
        "reward_hacking",
        f"the reward rose from {rewards[0]:.3g} to {rewards[1]:.3g} in training and fell from "
        f"{then.mean:.3g} at version {best} to {now.mean:.3g} in evaluations",
        course.whole(),
        {
            "training": list(rewards),
            "evaluation": [course.held_out[version].mean for version in sorted(course.held_out)],
            "best_version": best,
        },
        course.training.held_out(),
        ("the reward", "algorithm.kl", "fewer steps"),
    )


def overfitting(course: TrainingCourse) -> Finding | None:
    """The loss of held-out samples is a twentieth above its least, while that of training fell."""
    losses = [course.held_out_losses[version] for version in sorted(course.held_out_losses)]
    trained = course.ends("loss")
    if trained is None or len(losses) < 3 or trained[1] >= trained[0]:
        return None
    if losses[-1] - min(losses) <= 0.05 * abs(min(losses)):
        return None
    best = min(course.held_out_losses, key=lambda version: course.held_out_losses[version])
    return Finding(
        "overfitting",
        f"the loss fell from {trained[0]:.3g} to {trained[1]:.3g} in training; that of held-out samples is "
        f"{losses[-1]:.3g} and was {min(losses):.3g} at version {best}",
        course.whole(),
        {"training": list(trained), "evaluation": losses, "best_version": best},
        course.training.losses(),
        ('a [[stop]] on evaluation.loss with better = "lower"', "more samples", "optimizer.weight_decay"),
    )


def critic_divergence(course: TrainingCourse) -> Finding | None:
    """At the end the values explain less than nothing of the returns."""
    ends = course.ends("explained_variance")
    if ends is None or ends[1] >= 0:
        return None
    return Finding(
        "critic_divergence",
        f"the critic's explained variance is {ends[1]:.3g} at the end: its values are worse than their mean",
        course.whole(),
        {"first": ends[0], "last": ends[1]},
        course.training.metrics("value_loss", "explained_variance", "critic_gradient_norm"),
        ("critic.lr", "critic.alone_steps", "algorithm.value_clip", "algorithm.reward_clip"),
    )


def sampler_gap(course: TrainingCourse) -> Finding | None:
    """In three steps or more, engine and trainer disagreed about tokens of one version by more than 0.05."""
    odd = [
        (number, gap)
        for number, row in zip(course.numbers, course.rows, strict=True)
        if (gap := row.get("engine_logprob_gap")) is not None and gap > 0.05
    ]
    if len(odd) < 3:
        return None
    worst = max(gap for _, gap in odd)
    return Finding(
        "sampler_gap",
        f"in {len(odd)} steps engine and trainer differ about tokens of one version, by up to {worst:.3g}",
        (odd[0][0], odd[-1][0]),
        {"steps": len(odd), "worst": worst},
        course.training.metrics("engine_logprob_gap", "engine_logprob_gap_mean", "stale_logprob_gap"),
        ('algorithm.old = "trainer" with algorithm.correction', "the engine's weights: docs/engines.md"),
    )


def empty_gradients(course: TrainingCourse) -> Finding | None:
    """A fifth of the steps had no gradient, or more samples were dropped for equal rewards than used."""
    norms = course.values("gradient_norm")
    empty, flat = sum(norm == 0 for norm in norms), course.dropped.get("zero_variance", 0)
    if not (len(norms) >= FEWEST and empty >= len(norms) / 5) and not flat > max(course.used, FEWEST):
        return None
    return Finding(
        "empty_gradients",
        f"{empty} of {len(norms)} steps had no gradient; {flat} samples were dropped because all of their "
        f"group had one reward, {course.used} were used",
        course.whole(),
        {"steps": len(norms), "without_gradient": empty, "zero_variance": flat, "used": course.used},
        course.training.without_gradient(),
        ("tasks of another difficulty", "algorithm.group_size", "recipe.refill"),
    )


def exploding_gradient(course: TrainingCourse) -> Finding | None:
    """At the end the gradient is more than ten times its median."""
    ends, norms = course.ends("gradient_norm"), course.values("gradient_norm")
    if ends is None or ends[1] <= 10 * median(norms) or median(norms) == 0:
        return None
    return Finding(
        "exploding_gradient",
        f"the gradient's norm is {ends[1]:.3g} at the end, where its median is {median(norms):.3g}",
        course.whole(),
        {"median": median(norms), "last": ends[1]},
        course.training.metrics("gradient_norm", "ratio_max", "loss"),
        ("optimizer.lr", "optimizer.clip_grad", "algorithm.dual_clip"),
    )


def clip_saturation(course: TrainingCourse) -> Finding | None:
    """At the end, four in ten tokens have no gradient because they are clipped."""
    low, high = course.ends("clipped_low"), course.ends("clipped_high")
    if low is None or high is None or low[1] + high[1] <= 0.4:
        return None
    return Finding(
        "clip_saturation",
        f"{low[1] + high[1]:.0%} of the tokens are clipped at the end: the policy is far from the one that "
        "ratios are taken to",
        course.whole(),
        {"low": low[1], "high": high[1]},
        course.training.metrics("clipped_low", "clipped_high", "staleness_mean", "ratio_max"),
        ('algorithm.old = "trainer"', "recipe.max_staleness", "algorithm.epochs", "optimizer.lr"),
    )


def mostly_stale(course: TrainingCourse) -> Finding | None:
    """More than three in ten samples were dropped as stale."""
    stale = course.dropped.get("staleness", 0)
    if stale <= 0.3 * (course.used + stale) or stale < FEWEST:
        return None
    return Finding(
        "mostly_stale",
        f"{stale} samples were dropped as stale and {course.used} used: slow trajectories are not trained on",
        course.whole(),
        {"staleness": stale, "used": course.used},
        course.training.dropped_and_used("staleness"),
        ("recipe.max_staleness", "recipe.stale_tokens", "recipe.stale_share", "admission.hold"),
    )


def truncation(course: TrainingCourse) -> Finding | None:
    """At the end, three in ten samples are cut off at their greatest length."""
    ends = course.ends("truncated")
    if ends is None or ends[1] <= 0.3:
        return None
    return Finding(
        "truncation",
        f"{ends[1]:.0%} of the samples are cut off at their greatest length at the end, {ends[0]:.0%} at "
        "first",
        course.whole(),
        {"first": ends[0], "last": ends[1]},
        course.training.metrics("truncated", "length_mean", "length_max"),
        ("the agents' max_tokens", "algorithm.truncated_reward", "algorithm.overlong_length"),
    )


SIGNS: tuple[Callable[[TrainingCourse], Finding | None], ...] = (
    entropy_collapse,
    length_hacking,
    reward_hacking,
    falling_evaluations,
    partial_evaluations,
    overfitting,
    kl_explosion,
    chosen_less_likely,
    critic_divergence,
    sampler_gap,
    empty_gradients,
    exploding_gradient,
    clip_saturation,
    mostly_stale,
    truncation,
    failed_steps,
    failed_syncs,
    failed_turns,
    failed_launches,
)


def findings(course: TrainingCourse) -> list[Finding]:
    """Every failure of which there are signs."""
    return [finding for sign in SIGNS if (finding := sign(course)) is not None]
