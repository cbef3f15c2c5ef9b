"""Preflight: the checks worth making before a training is started, each with a verdict.

Checks of a configuration's settings, on their own and against what was recorded.

The check `correction`: whether tokens that other weights sampled are weighted as they should be.
Pure.

What the log holds for a configuration to train on, as far as preflight judges it; and the checks
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, pi, sqrt
from statistics import NormalDist
from typing import Any, get_args

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import TrainError
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.store.safe_paths import place_inside
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.trial import try_out
from rollbook.train.batches.units import Applied, apply_recipe
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.recipe import Split
from rollbook.train.doctor.check import Check, Fault, Verdict, check_of, limits_of
from rollbook.train.doctor.memory import model_and_memory
from rollbook.train.doctor.reward_function import (
    RewardStatistics,
    completions,
    equality,
    flatness,
    reward_function,
    statistics_of,
)
from rollbook.train.select.why_unused import remedy_for
from rollbook.train.sources.held_out import learns_from_samples


def preflight(
    config: TrainConfig, log: Store | None, cut: Cut, source: str, memory: int, reward: str | None = None
) -> list[Check]:
    """Every check of a configuration.

    Args:
        log: that it is to train on; None: only what needs none is checked.
        cut: of the log.
        source: `cut` or `tail`.
        memory: bytes of this machine.
        reward: `module:function` that is to be tried on completions of the log.

    Raises:
        ConfigError: a condition of the recipe is not SQL.
        CorruptionError: a file of the log is damaged.
    """
    recorded = None if log is None else read_recorded(log, cut, config)
    checks = [
        *model_and_memory(config, 0 if recorded is None else recorded.longest, memory),
        batch(config, recorded, source),
        *normalization(config, recorded),
        *kl_control(config, recorded),
        _parts(config),
        staleness(config, source),
        *correction(config, recorded, source),
        *routing(config, recorded, source),
    ]
    if recorded is not None:
        checks += [data(config, recorded, source), *rewards(config, recorded, source)]
        checks.append(evaluation(config, recorded, source))
    if reward is not None and log is not None:
        checks.append(reward_function(reward, completions(log, cut, config)))
    return checks


def _parts(config: TrainConfig) -> Check:
    """Whether every part of the algorithm gives what is asked of it, on a made-up batch."""
    try:
        try_out(config.algorithm)
    except TrainError as error:
        return Check("parts", "red", str(error), "[algorithm]")
    return Check("parts", "green", "each gives what is asked of it, on a batch made up to try it")


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


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What a log holds for a configuration.

    Attributes:
        applied: the samples that its recipe keeps and drops.
        rewards: of the recipe's source; sources: source -> how many rewards it gave.
        held_out: finished trajectories of split `eval`.
        elsewhere: split that the recipe does not take but could -> its finished trajectories.
        gap: mean difference of engine's and trainer's logprobs in the newest step that measured
            it.
        checkpoints: version of the policy -> whether its checkpoint is still there.
        routed: how many tokens of its trajectories have experts, and how many tokens there are.
    """

    applied: Applied
    rewards: RewardStatistics
    sources: Counter[str]
    held_out: int
    gap: float | None
    checkpoints: Mapping[int, bool]
    routed: tuple[int, int]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((ref.length for ref in self.applied.kept), default=0)

    @property
    def longest_trained(self) -> int:
        """The most trained tokens of any sample."""
        return max((ref.trained for ref in self.applied.kept), default=0)

    @property
    def mean_trained(self) -> float:
        """The mean number of trained tokens per sample; 1 without samples."""
        kept = self.applied.kept
        return sum(ref.trained for ref in kept) / len(kept) if kept else 1.0

    @property
    def largest_group(self) -> int:
        """The number of trajectories in the largest group, dropped ones included."""
        members: dict[str, set[str]] = {}
        for ref in [*self.applied.kept, *(drop.sample for drop in self.applied.drops)]:
            members.setdefault(ref.group or ref.trajectory_id, set()).add(ref.trajectory_id)
        return max(map(len, members.values()), default=0)


def read_recorded(log: Store, cut: Cut, config: TrainConfig) -> Recorded:
    """Read it from the log.

    Raises:
        ConfigError: a condition of the recipe is not SQL.
        CorruptionError: a file is damaged.
        OutsideError: the log names a checkpoint that is not in the store.
    """
    recipe, settings = config.recipe, config.evaluation
    runs = list(recipe.runs(config.run))
    held_out = list((settings.source_runs if settings is not None else ()) or runs)
    history = fold_history(log.events_of(KINDS, cut), config.run, config.policy)
    with connect_at(log, format_cut(cut)) as connection:

        def rows(query: str, **values: Any) -> list[tuple[Any, ...]]:
            return connection.read(query, values).fetchall()

        reward_rows = rows(_REWARDS, runs=runs, splits=list(recipe.splits), source=recipe.reward_source)
        sources = rows(_SOURCES, runs=runs)
        [(held,)] = rows(_HELD_OUT, runs=held_out)
        gaps = rows(_GAP, run=config.run, policy=config.policy)
        splits = [split for split in get_args(Split) if split not in recipe.splits]
        elsewhere = dict(rows(_ELSEWHERE, runs=runs, splits=splits))
        routed = (0, 0)
        if config.routing_replay:
            [routed] = rows(_ROUTED, runs=runs, splits=list(recipe.splits))
    return Recorded(
        applied=apply_recipe(
            log, cut, config.run, config.policy, recipe, config.algorithm, limits=limits_of(config)
        ),
        rewards=statistics_of([reward for _, reward in reward_rows], [group for group, _ in reward_rows]),
        sources=Counter(dict(sources)),
        held_out=held,
        gap=gaps[0][0] if gaps else None,
        checkpoints={
            checkpoint.policy_version: place_inside(log.path, checkpoint.path).is_dir()
            for checkpoint in history.checkpoints
        },
        routed=routed,
        elsewhere=elsewhere,
    )


MOST = 0.5
"""Share of recorded tokens with experts from which on routing is replayed for most of them: of each turn the
last one has none."""

_REWARDS = """
    SELECT t.run || '/' || t."group", arg_max(r.reward, (r.lane, r.seq))
    FROM rewards r JOIN trajectories t USING (trajectory_id)
    WHERE list_contains($runs, t.run) AND list_contains($splits, t.split) AND t.finished IS NOT NULL
      AND r.turn_id IS NULL AND NOT r.superseded AND r.source = $source
    GROUP BY trajectory_id, t.run, t."group" """
_SOURCES = """
    SELECT source, count(*) FROM rewards
    WHERE list_contains($runs, run) AND turn_id IS NULL AND NOT superseded GROUP BY ALL"""
_ROUTED = """
    SELECT coalesce(sum(CAST(json_extract(e.extra, '$.routed_experts.shape[0]') AS BIGINT)), 0)::BIGINT,
           coalesce(sum(len(e.prompt_ids) + len(e.completion_ids)), 0)::BIGINT
    FROM internal.turn_events e JOIN internal.trajectory_scalars t USING (trajectory_id)
    WHERE e.kind = 'turn.completed' AND t.finished IS NOT NULL
      AND list_contains($runs, t.run) AND list_contains($splits, t.split)"""
_ELSEWHERE = """
    SELECT split, count(*) FROM trajectories
    WHERE list_contains($runs, run) AND list_contains($splits, split) AND finished IS NOT NULL
    GROUP BY split"""
_HELD_OUT = "SELECT count(*) FROM trajectories WHERE list_contains($runs, run) AND split = 'eval'"
_GAP = """
    SELECT engine_logprob_gap_mean FROM metrics
    WHERE run = $run AND policy = $policy AND engine_logprob_gap_mean IS NOT NULL
    ORDER BY step DESC LIMIT 1"""


def data(config: TrainConfig, recorded: Recorded, source: str) -> Check:
    """Whether the recipe leaves enough for a batch."""
    applied, demand = recorded.applied, config.algorithm.demand
    grouped = "groups" in config.algorithm.needs
    members: dict[str, set[str]] = {}
    for ref in applied.kept:
        key = (ref.group or ref.trajectory_id) if grouped else ref.leaf_turn_id
        members.setdefault(key, set()).add(ref.trajectory_id)
    whole = sum(len(ids) >= demand.group_size for ids in members.values()) if grouped else len(members)
    unit = ("whole groups" if grouped else "samples") if applied.pairs is None else "pairs"
    whole = whole if applied.pairs is None else len(applied.pairs)
    dropped = ", ".join(f"{rule} {count}" for rule, count in applied.rules.most_common()) or "none"
    there = "" if unit == "samples" else f"{len(applied.kept)} samples, "
    summary = f"{there}{whole} {unit} where a rollout batch takes {demand.groups}; dropped: {dropped}"
    too_few: Verdict = "red" if source == "cut" else "yellow"
    if whole >= demand.groups:
        return Check("data", "green", summary, "[recipe]")
    for split, count in recorded.elsewhere.items():
        summary += f"; {count} trajectories are of split {split!r}{remedy_for(split)}"
    return Check("data", too_few, summary, "recipe.splits" if recorded.elsewhere else "[recipe]")


def rewards(config: TrainConfig, recorded: Recorded, source: str) -> list[Check]:
    """Whether there are rewards, and whether they differ: over all, and within groups."""
    if "rewards" not in config.algorithm.needs:
        return []
    wanted, statistics = config.recipe.reward_source, recorded.rewards
    there = ", ".join(f"{name} {count}" for name, count in recorded.sources.most_common()) or "none"
    if not statistics.count:
        summary = f"none from source {wanted!r} (there are: {there})"
        none_yet = source == "tail" and not recorded.sources
        return [Check("rewards", "yellow" if none_yet else "red", summary, "recipe.reward_source")]
    faults = []
    if statistics.not_finite:
        text = f"{statistics.not_finite} of them not finite, whose samples are dropped"
        faults.append(Fault("yellow" if statistics.finite else "red", text, "the reward"))
    by_turn = isinstance(config.algorithm, GroupPolicyGradient) and config.algorithm.turn_rewards
    faults += [] if by_turn else equality(statistics, "the reward; tasks of another difficulty")
    checks = [check_of("rewards", f"from source {wanted!r}: {statistics.in_words()}", faults)]
    if "groups" in config.algorithm.needs and statistics.groups and not by_turn:
        summary = f"{statistics.flat} of {statistics.groups} groups have one reward throughout"
        lever = "tasks of another difficulty; algorithm.group_size"
        checks.append(check_of("difficulty", summary, flatness(statistics, lever)))
    return checks


def evaluation(config: TrainConfig, recorded: Recorded, source: str) -> Check:
    """Whether something is held out of training."""
    settings = config.evaluation
    if recorded.held_out:
        every = "" if settings is None else f", every {settings.every} steps"
        count = "one trajectory" if recorded.held_out == 1 else f"{recorded.held_out} trajectories"
        return Check("evaluation", "green", f"{count} of split eval{every}")
    if settings is not None and source == "cut" and learns_from_samples(config.algorithm):
        runs = ", ".join(settings.source_runs or config.recipe.runs(config.run))
        summary = f"no trajectory of split eval in run {runs} to evaluate on"
        return Check("evaluation", "red", summary, "evaluation.source_runs")
    summary = "no trajectory of split eval: a reward that is gamed looks like one that is earned"
    return Check("evaluation", "yellow", summary, "agents that open trajectories with split eval")


def routing(config: TrainConfig, recorded: Recorded | None, source: str) -> list[Check]:
    """Whether there are experts to replay, both in the model and in what was recorded."""
    if not config.routing_replay:
        return []
    limits = limits_of(config)
    if limits is not None and limits.mixture is None:
        return [Check("routing", "red", "the model has no experts", "routing_replay")]
    if recorded is None:
        return []
    routed, tokens = recorded.routed
    lever = "rollbook serve --routed-experts"
    if not tokens:
        verdict: Verdict = "yellow" if source == "tail" else "red"
        return [Check("routing", verdict, "no token is recorded", lever)]
    share = routed / tokens
    summary = f"{share:.0%} of the recorded tokens have experts"
    if not routed:
        return [Check("routing", "red", f"{summary}: nothing is replayed", lever)]
    if share < MOST:
        summary += ": for the others routers choose"
    return [Check("routing", "yellow" if share < MOST else "green", summary, "" if share >= MOST else lever)]
