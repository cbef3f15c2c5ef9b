"""Scoring by itself: launches that ended are scored again, and rewards that changed are superseded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.rollouts.config import RolloutConfig
from rollbook.rollouts.launchers.agent_environment import folder_of
from rollbook.rollouts.places import read_course
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.scoring import Scorers
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError

AGENT = "agent"
"""The source of a trajectory's own reward, which the weighted sum of scores is."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """What a scoring did.

    Attributes:
        scored: launches of which every component gave a number.
        failed: launches of which one did not; its earlier reward is still in force.
        rewards: that were written, since they are new or another number.
        left_out: why a launch could not be scored -> how many.
    """

    scored: int
    failed: int
    rewards: int
    left_out: Mapping[str, int]


async def assign(proxy: Proxy, trajectory: str, wanted: Mapping[str, float]) -> int:
    """Give a trajectory a reward of each source, in the place of the one in force; how many were written.

    Raises:
        RolloutError: the proxy does not answer, or refuses.
    """
    in_force = {
        reward["source"]: reward
        for reward in (await proxy.trajectory(trajectory))["rewards"]
        if reward["turn_id"] is None and not reward["superseded"]
    }
    changed = {
        source: value
        for source, value in wanted.items()
        if source not in in_force or in_force[source]["reward"] != value
    }
    for source, value in changed.items():
        earlier = in_force.get(source)
        await proxy.reward(trajectory, value, source, None if earlier is None else earlier["event_id"])
    return len(changed)


async def score_again(
    config: RolloutConfig,
    tasks: list[Task],
    proxy: Proxy,
    scorers: Scorers,
    say: Callable[[str], None] = lambda text: None,
) -> Rescored:
    """Score again every launch of the CONFIG's name that ended with a right to a reward, if its folder is
    there.

    Args:
        say: told of each component that failed.

    Raises:
        ConfigError: the CONFIG has no scorers.
        RolloutError: the proxy does not answer, or refuses.
    """
    if not config.score:
        raise ConfigError("the CONFIG has no [[score]]: there is nothing to score by")
    by_name = {task.name: task for task in tasks}
    places = asyncio.Semaphore(config.concurrency)
    tally: Counter[str] = Counter()

    async def rescore(name: str, task: str, folder: Path) -> None:
        async with places:
            if task not in by_name:
                tally["its task is not among the CONFIG's"] += 1
            elif not folder.is_dir():
                tally["its folder is gone"] += 1
            else:
                await again(name, by_name[task], folder)

    async def again(name: str, task: Task, folder: Path) -> None:
        scores = await scorers.score(task, name, folder)
        assert scores is not None
        for component, why in scores.errors.items():
            say(f"{name}: scorer {component} failed: {why}")
        whole = {} if scores.total is None else {AGENT: scores.total}
        written = await assign(proxy, name, {**scores.values, **whole})
        tally["rewards"] += written  # not in one with the wait, or what others add meanwhile is lost
        tally["failed" if scores.errors else "scored"] += 1

    async with scorers:
        await asyncio.gather(*(rescore(*launch) for launch in await _ended(config, proxy)))
    scored, failed, rewards = (tally.pop(what, 0) for what in ("scored", "failed", "rewards"))
    return Rescored(scored, failed, rewards, left_out=dict(tally))


async def _ended(config: RolloutConfig, proxy: Proxy) -> list[tuple[str, str, Path]]:
    """Trajectory, task and folder of each launch that ended with a right to a reward."""
    course = read_course(await proxy.course(config.name))
    launches = []
    for place, status in course.ended.items():
        if status.rewarded:
            name = place.trajectory(config.name, course.attempts[place])
            launches.append((name, place.task, folder_of(config.folder, name, course.launches[place])))
    return launches
