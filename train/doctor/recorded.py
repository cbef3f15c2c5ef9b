"""What the log holds for a configuration to train on, as far as preflight judges it; and the checks
of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.store.safe_paths import place_inside
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.batches.recipe_result import Applied, apply_recipe
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.recipe import Split
from rollbook.train.doctor.check import Check, Fault, Verdict, check_of, limits_of
from rollbook.train.doctor.reward_function import RewardStatistics, equality, flatness, statistics_of
from rollbook.train.select.why_unused import remedy_for
from rollbook.train.sources.held_out import learns_from_samples


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
            return connection.execute(query, values).fetchall()

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
    checks = [check_of("rewards", f"from source {wanted!r}: {statistics.said()}", faults)]
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
