"""Rewards of recorded trajectories by a function of the user's, and the writing of them to the log."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollbook.store import Event, Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json, RewardAssigned, RunOpened
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.export import as_json
from rollbook.store.interchange.paths import paths
from rollbook.train.algorithms.parts import NAMED, load_part

LANE = "rescore"
"""The lane that new rewards are written in."""


@dataclass(slots=True, eq=False)
class Rescoring:
    """Gives each trajectory a reward by a function, once.

    Attributes:
        name: `module:function`; source: of its rewards.
        rewards: trajectory -> what the function gave; None where it has no completion to give one for.
    """

    name: str
    source: str
    function: Callable[[Json], Any]
    rewards: dict[str, float | None] = field(default_factory=dict)

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the function's reward as the only one of its source.

        Raises:
            ConfigError: the function fails, or gives no finite number.
        """
        trajectory_id = trajectory.opened.trajectory_id
        if trajectory_id not in self.rewards:
            self.rewards[trajectory_id] = self._reward(trajectory)
        others = tuple(assigned for assigned in trajectory.rewards if assigned[1].source != self.source)
        if (reward := self.rewards[trajectory_id]) is None:
            return replace(trajectory, rewards=others)
        assigned = RewardAssigned(trajectory_id, None, reward, self.source)
        return replace(trajectory, rewards=(*others, ("", assigned)))

    def _reward(self, trajectory: Trajectory) -> float | None:
        rows = [as_json(path) for path in paths(trajectory)][-1:]
        if not rows:
            return None
        about = f"--rescore {self.name}: of trajectory {trajectory.opened.name}"
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what is shown
                value = self.function(rows[0])
        except Exception as error:  # the function's own code ran
            raise ConfigError(f"{about} it raised {error!r}: mend the function") from error
        try:
            reward = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise ConfigError(f"{about} it gave {value!r}: return a finite number")
        return reward


def rescoring(name: str, source: str | None) -> Rescoring:
    """The function of a name, `module:function`, which is imported here.

    Args:
        source: of its rewards; None: the function's own name.

    Raises:
        ConfigError: the name names no function.
        TrainError: it cannot be imported.
    """
    if not re.fullmatch(NAMED, name):
        raise ConfigError(f"--rescore {name!r} names no function: write module:function")
    function = load_part(name)
    if not callable(function):
        raise ConfigError(f"--rescore {name}: it is {type(function).__name__}, no function")
    return Rescoring(name, source or name.rpartition(":")[2], function)


@dataclass(frozen=True, slots=True)
class Written:
    """What was done to record rewards.

    Attributes:
        source: of the rewards.
        written: new ones; replaced: how many of these superseded another; already: those that were
            there.
    """

    source: str
    written: int
    replaced: int
    already: int


def write_rewards(log: Store, run: str, scorer: Rescoring, reserved: str, *, replaces: bool) -> Written:
    """Append the rewards of a function as events of its source, once: those that are there already stay.

    Args:
        run: the one that is asked about, in which the source is opened.
        reserved: the source that the run trained on, which a what-if leaves alone.
        replaces: whether a reward of the source with another value is superseded.

    Raises:
        ConfigError: the source is the reserved one, or has rewards with other values that are not to be
            replaced.
        LaneLockedError: another process writes rewards so.
    """
    if scorer.source == reserved:
        raise ConfigError(
            f"--source {scorer.source!r}: the step was trained on rewards of this source: name another, "
            "which the recipe.reward_source of a training then names"
        )
    rewards = {key: value for key, value in scorer.rewards.items() if value is not None}
    with log.claim(f"rescoring as {scorer.source!r}", "let it finish, or name another --source"):
        held = log.trajectories(None, set(rewards))
        there = {key: _in_force(trajectory, scorer.source) for key, trajectory in held.items()}
        odd = [key for key, current in there.items() if current is not None and current[1] != rewards[key]]
        if odd and not replaces:
            first = held[odd[0]].opened.name
            raise ConfigError(
                f"--source {scorer.source!r}: {len(odd)} trajectories have another reward of it, {first} "
                f"{_value_text(there[odd[0]])} and now {rewards[odd[0]]:g}: name another --source, or "
                "supersede them with --replace"
            )
        records = _records(held, rewards, there, scorer.source)
        if records:
            opened = RunOpened("what-if", _described(scorer))
            events = [Event(opened, run)]
            events += [Event(record, held[record.trajectory_id].run) for record in records]
            with log.writer(LANE) as writer:
                writer.append(events).result()
    return Written(scorer.source, len(records), len(odd), len(there) - len(records))


def _records(
    held: Mapping[str, Trajectory],
    rewards: Mapping[str, float],
    there: Mapping[str, tuple[str, float] | None],
    source: str,
) -> list[RewardAssigned]:
    """The rewards that are not in force yet."""
    records = []
    for key in held:
        current = there[key]
        if current is None or current[1] != rewards[key]:
            supersedes = None if current is None else current[0]
            records.append(RewardAssigned(key, None, rewards[key], source, supersedes))
    return records


def _in_force(trajectory: Trajectory, source: str) -> tuple[str, float] | None:
    """The event id and the value of a trajectory's reward of a source."""
    superseded = {reward.supersedes for _, reward in trajectory.rewards if reward.supersedes}
    matches = [
        (event_id, reward.reward)
        for event_id, reward in trajectory.rewards
        if (reward.source, reward.turn_id) == (source, None) and event_id not in superseded
    ]
    return matches[-1] if matches else None


def _value_text(reward: tuple[str, float] | None) -> str:
    return "none" if reward is None else f"{reward[1]:g}"


def _described(scorer: Rescoring) -> Json:
    """The origin of the rewards: the function, and the sha256 of the file that it is defined in."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(scorer.function))
    except TypeError:
        file = None
    digest = None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {"source": scorer.source, "function": scorer.name, "source_sha256": digest}
