"""`launcher = "verifiers"` with the real package, where something fails: the status says whose it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import ENVIRONMENT, Proxy

from rollbook import store as rb
from rollbook.rollouts.config import parse_rollouts
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.proxy import Proxy as Asked
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import read_tasks
from rollbook.store.errors import RolloutError

FAILING = """
import asyncio, os, signal
import verifiers.v1 as vf

class FailsHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        what = data.prompt
        if what == "sleep":
            await asyncio.sleep(60)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return await runtime.run_program(["sh", "-c", "exit 0" if what == "nan" else "exit 3"], {})

class FailsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def good(self) -> float:
        return float("nan") if self.data.prompt == "nan" else 1.0

class FailsTaskset(vf.Taskset[FailsTask, vf.TasksetConfig]):
    def load(self):
        what = ("exit", "sleep", "nan", "die")
        return [FailsTask(vf.TaskData(prompt=one), self.config.task) for one in what]

__all__ = ["FailsHarness", "FailsTaskset"]
"""


def _rolled(proxy: Proxy, folder: Path, name: str, words: list[str], **changes: Any) -> list[tuple[Any, ...]]:
    """(task, status, why) of each launch."""
    (folder / "fails.py").write_text(FAILING)
    agent = {
        "launcher": "verifiers",
        "command": [str(ENVIRONMENT / "verifiers" / "bin" / "vf-eval"), *words],
        "environment": {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]},
        "isolation": "session",
    }
    values = {"name": name, "proxy": proxy.url, "folder": str(folder / "rollouts"), "agent": agent}
    values |= {"retries": {"attempts": 1}, "tasks": "range:1"} | changes
    config = parse_rollouts(values, "test")

    async def run() -> None:
        async with Asked(config.proxy) as client:
            launcher = launcher_of(config)
            tasks = read_tasks(config.tasks)
            agents = agents_of(config, client, launcher)
            with contextlib.suppress(RolloutError):  # so many failed by their infrastructure
                await Rollouts(config, tasks, client, agents, launcher, "test").run()

    asyncio.run(run())
    with rb.connect(proxy.path) as connection:
        query = "SELECT task, status, why FROM launches WHERE rollout = ? ORDER BY task"
        return connection.execute(query, [name]).fetchall()


WORDS = ["fails", "--env.agent.harness.id", "fails", "--env.agent.runtime.type", "subprocess"]


def test_the_agents_failure_its_time_and_what_is_nobodys(proxy: Proxy, tmp_path: Path) -> None:
    """A program that exits with 3, one that takes too long, a reward that is no number, and no such task."""
    words = [*WORDS, "--env.agent.timeout.rollout", "1", "--select.include.idx", "0:3"]
    exits, sleeps, nan, none = _rolled(proxy, tmp_path, "ends", words, tasks="range:4")
    assert exits[1] == "agent_error"
    assert "HarnessError" in exits[2]
    assert sleeps[1:] == ("timeout", "its agent clock ran out")
    assert nan[1] == "infra_error"
    assert "not JSON compliant" in nan[2]
    assert none[1] == "infra_error"
    assert "the environment has 3 tasks, and none at position 3" in none[2]


def test_our_clocks_end_a_rollout_and_not_the_others(proxy: Proxy, tmp_path: Path) -> None:
    """It is cancelled, in the process that goes on."""
    words = [*WORDS, "--select.include.idx", "0:2"]
    clocks = {"start_s": 1.0, "grace_s": 5.0}
    exits, sleeps = _rolled(proxy, tmp_path, "clocks", words, tasks="range:2", clocks=clocks)
    assert exits[1] == "agent_error"
    assert sleeps[1:] == ("timeout", "its start clock ran out")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*WORDS, "--select.include.idx", "3"], "its process went away"),
        (["no-such-environment"], "it ended at once"),
    ],
    ids=["dies", "unknown"],
)
def test_a_process_that_goes_away_is_no_agents_fault(
    words: list[str], why: str, proxy: Proxy, tmp_path: Path
) -> None:
    """Whatever it printed last is told."""
    [launch] = _rolled(proxy, tmp_path, why.replace(" ", "-"), words)
    assert launch[1] == "infra_error"
    assert why in launch[2]
