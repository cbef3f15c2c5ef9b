"""What the log holds that a configuration is to train on, as far as preflight judges it; and its checks."""

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
        elsewhere: split that the recipe does not take and might -> its finished trajectories.
        gap: mean difference of engine's and trainer's logprobs in the newest step that measured it.
        checkpoints: version of the policy -> whether its checkpoint is still there.
        routed: of the tokens of its trajectories how many have experts, and how many there are.
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
        """Trained tokens of the sample that has most."""
        return max((ref.trained for ref in self.applied.kept), default=0)

    @property
    def mean_trained(self) -> float:
        """Trained tokens of a sample, on average; 1 without samples."""
        kept = self.applied.kept
        return sum(ref.trained for ref in kept) / len(kept) if kept else 1.0

    @property
    def largest_group(self) -> int:
        """Trajectories of the largest group, dropped ones too."""
        members: dict[str, set[str]] = {}
        for ref in [*self.applied.kept, *(drop.sample for drop in self.applied.drops)]:
            members.setdefault(ref.group or ref.trajectory_id, set()).add(ref.trajectory_id)
        return max(map(len, members.values()), default=0)


def read_recorded(log: Store, cut: Cut, config: TrainConfig) -> Recorded:
    """Read it.

    Raises:
        ConfigError: a condition of the recipe is not SQL.
        CorruptionError: a file is damaged.
        OutsideError: the log names a checkpoint that is not in the store.
    """
    recipe, asked = config.recipe, config.evaluation
    runs = list(recipe.runs(config.run))
    held_out = list((asked.source_runs if asked is not None else ()) or runs)
    history = fold_history(log.events_of(KINDS, cut), config.run, config.policy)
    with connect_at(log, format_cut(cut)) as connection:

        def rows(query: str, **given: Any) -> list[tuple[Any, ...]]:
            return connection.execute(query, given).fetchall()

        of = rows(_REWARDS, runs=runs, splits=list(recipe.splits), source=recipe.reward_source)
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
        rewards=statistics_of([reward for _, reward in of], [group for group, _ in of]),
        sources=Counter(dict(sources)),
        held_out=held,
        gap=gaps[0][0] if gaps else None,
        checkpoints={
            one.policy_version: place_inside(log.path, one.path).is_dir() for one in history.checkpoints
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


def data(config: TrainConfig, seen: Recorded, source: str) -> Check:
    """Whether the recipe leaves enough for a batch."""
    applied, demand = seen.applied, config.algorithm.demand
    grouped = "groups" in config.algorithm.needs
    members: dict[str, set[str]] = {}
    for ref in applied.kept:
        key = (ref.group or ref.trajectory_id) if grouped else ref.leaf_turn_id
        members.setdefault(key, set()).add(ref.trajectory_id)
    whole = sum(len(of) >= demand.group_size for of in members.values()) if grouped else len(members)
    unit = ("whole groups" if grouped else "samples") if applied.pairs is None else "pairs"
    whole = whole if applied.pairs is None else len(applied.pairs)
    dropped = ", ".join(f"{rule} {count}" for rule, count in applied.rules.most_common()) or "none"
    there = "" if unit == "samples" else f"{len(applied.kept)} samples, "
    said = f"{there}{whole} {unit} where a rollout batch takes {demand.groups}; dropped: {dropped}"
    too_few: Verdict = "red" if source == "cut" else "yellow"
    if whole >= demand.groups:
        return Check("data", "green", said, "[recipe]")
    for split, count in seen.elsewhere.items():
        said += f"; {count} trajectories are of split {split!r}{remedy_for(split)}"
    return Check("data", too_few, said, "recipe.splits" if seen.elsewhere else "[recipe]")


def rewards(config: TrainConfig, seen: Recorded, source: str) -> list[Check]:
    """Whether there are rewards, and whether they differ: over all, and within groups."""
    if "rewards" not in config.algorithm.needs:
        return []
    wanted, of = config.recipe.reward_source, seen.rewards
    there = ", ".join(f"{name} {count}" for name, count in seen.sources.most_common()) or "none"
    if not of.count:
        said = f"none from source {wanted!r} (there are: {there})"
        none_yet = source == "tail" and not seen.sources
        return [Check("rewards", "yellow" if none_yet else "red", said, "recipe.reward_source")]
    faults = []
    if of.not_finite:
        text = f"{of.not_finite} of them not finite, whose samples are dropped"
        faults.append(Fault("yellow" if of.finite else "red", text, "the reward"))
    by_turn = isinstance(config.algorithm, GroupPolicyGradient) and config.algorithm.turn_rewards
    faults += [] if by_turn else equality(of, "the reward; tasks of another difficulty")
    found = [check_of("rewards", f"from source {wanted!r}: {of.said()}", faults)]
    if "groups" in config.algorithm.needs and of.groups and not by_turn:
        said = f"{of.flat} of {of.groups} groups have one reward throughout"
        lever = "tasks of another difficulty; algorithm.group_size"
        found.append(check_of("difficulty", said, flatness(of, lever)))
    return found


def evaluation(config: TrainConfig, seen: Recorded, source: str) -> Check:
    """Whether something is held out of training."""
    asked = config.evaluation
    if seen.held_out:
        every = "" if asked is None else f", every {asked.every} steps"
        count = "one trajectory" if seen.held_out == 1 else f"{seen.held_out} trajectories"
        return Check("evaluation", "green", f"{count} of split eval{every}")
    if asked is not None and source == "cut" and learns_from_samples(config.algorithm):
        runs = ", ".join(asked.source_runs or config.recipe.runs(config.run))
        said = f"no trajectory of split eval in run {runs} to evaluate on"
        return Check("evaluation", "red", said, "evaluation.source_runs")
    said = "no trajectory of split eval: a reward that is gamed looks like one that is earned"
    return Check("evaluation", "yellow", said, "agents that open trajectories with split eval")


def routing(config: TrainConfig, seen: Recorded | None, source: str) -> list[Check]:
    """Whether there are experts to replay: of the model, and of what was recorded."""
    if not config.routing_replay:
        return []
    limits = limits_of(config)
    if limits is not None and limits.mixture is None:
        return [Check("routing", "red", "the model has no experts", "routing_replay")]
    if seen is None:
        return []
    routed, tokens = seen.routed
    lever = "rollbook serve --routed-experts"
    if not tokens:
        verdict: Verdict = "yellow" if source == "tail" else "red"
        return [Check("routing", verdict, "no token is recorded", lever)]
    share = routed / tokens
    said = f"{share:.0%} of the recorded tokens have experts"
    if not routed:
        return [Check("routing", "red", f"{said}: nothing is replayed", lever)]
    if share < MOST:
        said += ": for the others routers choose"
    return [Check("routing", "yellow" if share < MOST else "green", said, "" if share >= MOST else lever)]
