"""Rollouts run in this process against a served proxy, and what its log says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollbook import store as rb
from rollbook.rollouts.config import RolloutConfig
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task


def tasks(*what: str) -> list[Task]:
    """A task for each thing to do."""
    return [Task(f"t{i}-{action.replace(' ', '-')}", {"do": action}) for i, action in enumerate(what)]


def run(
    config: RolloutConfig, what: list[Task], stop: Callable[[Rollouts], Any] | None = None
) -> tuple[Progress, list[str]]:
    """Run rollouts; how far they came, and what was said."""
    messages: list[str] = []

    async def all_of_it() -> Progress:
        launcher = launcher_of(config)
        async with Proxy(config.proxy) as proxy:
            agents = agents_of(config, proxy, launcher)
            rollouts = Rollouts(config, what, proxy, agents, launcher, "test", messages.append)
            if stop is not None:
                stop(rollouts)
            try:
                return await asyncio.wait_for(rollouts.run(), 60)
            finally:
                await agents.close()

    return asyncio.run(all_of_it()), messages


def launches(server: Any, name: str) -> list[dict[str, Any]]:
    """What the log says of each launch of these rollouts, in order."""
    with rb.connect(server.path) as connection:
        query = """
            SELECT l.task, l.sample, l.attempt, l.status, l.why, l.exit_code, l.leaked, l.scoring, l.output,
                   l.isolation, t.status AS finished, t.split, t.reward, t.turns, t.trajectory, t."group"
            FROM launches l JOIN trajectories t USING (trajectory_id) WHERE rollout = $name
            ORDER BY l.task, l.sample, l.attempt"""
        rows = connection.execute(query, {"name": name})
        columns = [column[0] for column in rows.description]
        return [dict(zip(columns, row, strict=True)) for row in rows.fetchall()]


def columns_of(rows: list[dict[str, Any]], *columns: str) -> list[Any]:
    """These columns of each."""
    return [tuple(row[column] for column in columns) for row in rows]
