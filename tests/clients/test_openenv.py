"""`rollout = "openenv"` against a real server of OpenEnv, with its real client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.clients.conftest import ENVIRONMENT, HERE
from tests.examples.played import served
from tests.fakes.models.habits import make_habits

from rollbook import store as rb
from rollbook.rollouts.config import parse_rollouts
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import read_tasks
from rollbook.store.errors import RolloutError
from rollbook.testing.asgi import free_port

pytestmark = pytest.mark.timeout(600)

OPENENV = ENVIRONMENT / "openenv"


@pytest.fixture(scope="module")
def environment(packages: Path) -> Iterator[str]:
    """The address of the server; its client can be imported here meanwhile, after all that is ours."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [OPENENV / "bin" / "python", HERE / "programs" / "openenv_server.py", str(port)]
    [site] = OPENENV.glob("lib/python3*/site-packages")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site)])
        try:
            _await(url, process)
            yield url
        finally:
            process.terminate()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def _rolled(values: dict[str, Any]) -> Progress:
    config = parse_rollouts(values, "test")

    async def run() -> Progress:
        async with Proxy(config.proxy) as proxy:
            launcher, agents = launcher_of(config), agents_of(config, proxy, launcher_of(config))
            return await Rollouts(config, read_tasks(config.tasks), proxy, agents, launcher, "test").run()

    return asyncio.run(run())


def test_each_trajectory_has_a_session_and_its_rewards_by_turn(environment: str, tmp_path: Path) -> None:
    """A policy that says 0, 1, 2 or nonsense; the number is the task's seed. A trajectory for which there is
    no session is void."""
    sayings = [*(f'{{"number":"{number}"}}' for number in range(3)), '{"letter":"a"}', "Hm."]
    make_habits(tmp_path / "model", sayings, HERE.parents[1] / "docs")
    options = {"url": environment, "shown": "text", "instructions": "Be brief.", "most_turns": 9}
    agent = {"launcher": "python", "rollout": "openenv", "options": options}
    serving = ["--store", tmp_path / "store", "--model", tmp_path / "model", "--run", "numbers"]
    with served(tmp_path, *serving, "--threads", "1", "--no-admission") as url:
        values = {"name": "numbers", "proxy": url, "folder": str(tmp_path / "r"), "tasks": "range:2"}
        values |= {"samples": 4, "agent": agent, "retries": {"attempts": 1}}
        progress = _rolled(values | {"concurrency": 4})
        assert (progress.done, progress.rewarded) == (8, 8)
        assert progress.by_status.keys() <= {"done", "truncated"}
        many = _rolled(values | {"name": "many", "samples": 5, "retries": {"attempts": 1, "stop_share": 1.0}})
        assert many.by_status["infra_error"] > 0
        away = agent | {"options": options | {"url": f"http://127.0.0.1:{free_port()}"}}
        with pytest.raises(RolloutError, match=r"the OpenEnv server at .* does not serve"):
            _rolled(values | {"name": "away", "agent": away, "retries": {"attempts": 1, "window": 1}})
    with rb.connect(tmp_path / "store") as connection:
        query = """
            SELECT t.task, t.reward, list(u.content ORDER BY requested), list(u.reward ORDER BY requested)
            FROM trajectories t JOIN turns u USING (trajectory_id) WHERE t."group" LIKE 'numbers.%'
            GROUP BY trajectory_id, t.task, t.reward"""
        rows = connection.execute(query).fetchall()
        query = "SELECT DISTINCT why FROM launches WHERE rollout = 'many' AND status = 'infra_error'"
        whys = connection.execute(query).fetchall()
    assert all("does not serve" in why for (why,) in whys), whys
    assert len(rows) == 8
    for task, reward, replies, rewards in rows:
        guesses = [reply for reply in replies if "number" in reply]
        right = f'{{"number":"{task}"}}'
        assert right not in guesses[:-1]
        assert guesses[-1:] == [right] or len(guesses) == 4 or len(replies) == 9
        assert rewards == [float(reply == right) for reply in replies]
        assert reward == sum(rewards)
