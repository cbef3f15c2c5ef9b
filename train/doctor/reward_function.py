"""The check `reward_function`: what a user's own reward function returns for recorded completions,
and what that tells before anything learns from it.

The function is called as an agent would call it, so it may be slow, fail or never return: its
time is bounded, and what it did until then is reported.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import TrainError
from rollbook.store.events import Json
from rollbook.store.interchange.export import as_json
from rollbook.store.interchange.paths import paths
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.parts import NAMED, load_part
from rollbook.train.algorithms.rollouts import Floats
from rollbook.train.config.config import TrainConfig
from rollbook.train.doctor.check import Check, Fault, check_of

MOST = 64
"""Completions that it is asked about."""
PATIENCE_S = 30.0
"""Seconds that it gets for all of them."""
NAME = "reward_function"


@dataclass(frozen=True, slots=True)
class Completion:
    """A recorded completion: its group, and the row that the function is called with."""

    group: str | None
    row: Json


def completions(log: Store, cut: Cut, config: TrainConfig) -> list[Completion]:
    """Some finished trajectories of the recipe's runs and splits, chosen by the seed, group by
    group; each by its last path as a line of `rollbook export --format jsonl`.

    Raises:
        CorruptionError: a file is damaged.
    """
    params = {"runs": list(config.recipe.runs(config.run)), "splits": list(config.recipe.splits)}
    with connect_at(log, format_cut(cut)) as connection:
        rows = connection.read(_CHOSEN, params | {"seed": config.seed, "most": MOST}).fetchall()
    held = log.trajectories(cut, {trajectory_id for trajectory_id, _ in rows})
    examples = []
    for trajectory_id, group in rows:
        last = [as_json(path) for path in paths(held[trajectory_id])][-1:]
        examples += [Completion(group, row) for row in last]
    return examples


_CHOSEN = """
    SELECT trajectory_id, run || '/' || "group" AS in_group FROM trajectories
    WHERE list_contains($runs, run) AND list_contains($splits, split) AND finished IS NOT NULL AND turns > 0
    ORDER BY hash(coalesce(in_group, trajectory_id), $seed::BIGINT), trajectory_id LIMIT $most"""


def reward_function(name: str, examples: Sequence[Completion], patience_s: float = PATIENCE_S) -> Check:
    """Call the function named `module:function` with the row of each completion."""
    if not re.fullmatch(NAMED, name):
        summary = f"{name!r} names no function: write --reward module:function"
        return Check(NAME, "red", summary, "--reward")
    try:
        function = load_part(name)
    except TrainError as error:
        return Check(NAME, "red", str(error), "--reward")
    if not callable(function):
        return Check(NAME, "red", f"{name} is no function: it is {type(function).__name__}", "--reward")
    if not examples:
        summary = f"{name}: no finished trajectory with a completion to try it on"
        return Check(NAME, "yellow", summary, "recipe.source_runs, recipe.splits")
    began = time.monotonic()
    tried = _tried(function, examples, patience_s)
    return _judged(name, tried, len(examples), time.monotonic() - began, patience_s)


@dataclass(slots=True)
class _Tried:
    """What a function returned until it was stopped."""

    rewards: list[float] = field(default_factory=list)
    groups: list[str | None] = field(default_factory=list)
    raised: Counter[str] = field(default_factory=Counter)
    no_number: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        return len(self.rewards) + self.raised.total() + self.no_number.total()

    def add(self, function: Callable[[Json], Any], completion: Completion) -> None:
        """Call the function once."""
        try:
            value = function(completion.row)
        except BaseException as error:  # the function's own code ran
            self.raised[repr(error)[:200]] += 1
            return
        try:
            reward = None if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            reward = None
        if reward is None:
            shown = value is None or isinstance(value, str | bytes)
            self.no_number[repr(value)[:200] if shown else type(value).__name__] += 1
        else:
            self.rewards.append(reward)
            self.groups.append(completion.group)


def _tried(function: Callable[[Json], Any], examples: Sequence[Completion], patience_s: float) -> _Tried:
    tried, over = _Tried(), threading.Event()

    def call_each() -> None:
        for completion in examples:
            if over.is_set():
                return
            tried.add(function, completion)

    # A thread that never returns does not keep the process from ending.
    caller = threading.Thread(target=call_each, name=NAME, daemon=True)
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what the command says
        caller.start()
        caller.join(patience_s)
    over.set()
    return tried


def _judged(name: str, tried: _Tried, count: int, seconds: float, patience_s: float) -> Check:
    rewards = statistics_of(list(tried.rewards), list(tried.groups))
    summary = f"{name} on {count} recorded completions, {seconds:.1f} s"
    if rewards.finite:
        summary += f": {rewards.in_words()}"
    if rewards.groups:
        summary += f"; {rewards.flat} of {rewards.groups} groups have one reward throughout"
    faults = []
    if missing := count - tried.answered:
        text = f"no answer to {missing} of them within {patience_s:g} s"
        faults.append(Fault("yellow" if tried.answered else "red", text, "the reward function's time"))
    for what, counts in (("raised exceptions", tried.raised), ("gave no number", tried.no_number)):
        for worst, times in counts.most_common(1):
            text = f"{counts.total()} of them {what}, {times} times {worst}"
            faults.append(Fault("red", text, "the reward function"))
    if rewards.not_finite:
        faults.append(Fault("red", f"{rewards.not_finite} rewards are not finite", "the reward function"))
    lever = "the reward function; tasks of another difficulty"
    faults += equality(rewards, lever) or flatness(rewards, lever)
    return check_of(NAME, summary, faults)


MOSTLY_EQUAL = 0.95
"""Share of equal rewards from which on they are worth a look."""


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Rewards of trajectories.

    Attributes:
        count: how many there are; not_finite: how many of them are NaN or infinite.
        mean, deviation, least, greatest: of the finite ones; 0 where there are none.
        commonest: the most frequent finite one, the least of several; equal: its share of them.
        groups: those with two rewards or more; flat: how many of these have equal rewards
            throughout.
    """

    count: int = 0
    not_finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    least: float = 0.0
    greatest: float = 0.0
    commonest: float = 0.0
    equal: float = 0.0
    groups: int = 0
    flat: int = 0

    @property
    def finite(self) -> int:
        """How many are numbers."""
        return self.count - self.not_finite

    def in_words(self) -> str:
        """The statistics in a line of text."""
        if not self.finite:
            return f"{self.count} rewards"
        return (
            f"{self.count} rewards, mean {self.mean:.3g}, deviation {self.deviation:.3g}, most often "
            f"{self.commonest:.3g} ({self.equal:.0%})"
        )


def statistics_of(rewards: Sequence[float] | Floats, groups: Sequence[str | None]) -> RewardStatistics:
    """Statistics of rewards, each of a trajectory of the given group; None: it has no group."""
    values = np.asarray(rewards, np.float64)
    good = values[np.isfinite(values)]
    members: dict[str, list[float]] = {}
    for group, value in zip(groups, values.tolist(), strict=True):
        if group is not None and np.isfinite(value):
            members.setdefault(group, []).append(value)
    several = [group_rewards for group_rewards in members.values() if len(group_rewards) > 1]
    if not len(good):
        return RewardStatistics(len(values), len(values))
    different, times = np.unique(good, return_counts=True)
    return RewardStatistics(
        count=len(values),
        not_finite=len(values) - len(good),
        mean=float(good.mean()),
        deviation=float(good.std()),
        least=float(good.min()),
        greatest=float(good.max()),
        commonest=float(different[times.argmax()]),
        equal=float(times.max() / len(good)),
        groups=len(several),
        flat=sum(min(group_rewards) == max(group_rewards) for group_rewards in several),
    )


def equality(rewards: RewardStatistics, lever: str) -> list[Fault]:
    """What is wrong with rewards that hardly differ."""
    if rewards.finite > 1 and rewards.equal == 1:
        return [Fault("red", "all are equal, so no rollout is better than another", lever)]
    if rewards.finite > 1 and rewards.equal >= MOSTLY_EQUAL:
        return [Fault("yellow", "nearly all are equal, so most batches teach nothing", lever)]
    return []


def flatness(rewards: RewardStatistics, lever: str) -> list[Fault]:
    """What is wrong with groups whose rewards do not differ."""
    if not rewards.groups or rewards.flat <= rewards.groups / 2:
        return []
    if rewards.flat == rewards.groups:
        return [
            Fault("red", "a group of equal rewards has no advantages: no step would have a gradient", lever)
        ]
    return [Fault("yellow", "most groups have no advantages: their tasks are too easy or too hard", lever)]
