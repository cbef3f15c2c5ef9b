"""Rollouts over the nodes of a real Ray cluster, of two nodes on this host, of which one is killed."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.processes.ray_nodes import add_node, ray_nodes
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.rollouts.config import RolloutConfig, parse_rollouts
from rollbook.rollouts.launchers import ray_launcher
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.places import Progress
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.ray_manager import RayRollouts
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError, RolloutError
from rollbook.testing.ledger import fold_ledger

pytestmark = pytest.mark.ranks
KILLS = int(os.environ.get("ROLLBOOK_KILLS", "2"))
SEED = int(os.environ.get("ROLLBOOK_SEED", random.SystemRandom().getrandbits(24)))
AGENT = """
import json, os, time, urllib.request

task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))


def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()


ask("hello")
time.sleep(task["sleep"])
if "gate" in task:
    open(task["gate"] + ".reached", "w").close()
    while not os.path.exists(task["gate"]):
        time.sleep(0.02)
ask("hello")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, on which no agents are to be, and two nodes for agents."""
    with ray_nodes(*[{"resources": {"agents": 1}}] * 2) as started:
        yield started


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script, in a run of its own."""
    model = str(text_model("chatml"))
    return serve(
        "--model", model, "--engine", "scripted", "--script", f"{script}:answer", "--no-seal", "--run", "ray"
    )


@pytest.fixture
def config(server: Served, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., RolloutConfig]:
    """Makes a CONFIG under this test's name."""
    (tmp_path / "agent.py").write_text(AGENT)

    def make(**changes: Any) -> RolloutConfig:
        agent = {"launcher": "ray", "nodes": {"resources": {"agents": 1}}, "isolation": "session"}
        agent |= {"command": ["python3", "-S", str(tmp_path / "agent.py")]} | changes.pop("agent", {})
        values = {"name": request.node.name, "proxy": server.url, "folder": str(tmp_path / "launches")}
        values |= {"tasks": "none", "retries": {"pause_s": 0.1}, "clocks": {"grace_s": 0.2}, "agent": agent}
        return parse_rollouts(values | changes, "test")

    return make


def tasks(count: int, sleep: float) -> list[Task]:
    """Each asks twice, with a pause."""
    return [Task(f"t{i}", {"sleep": sleep}) for i in range(count)]


def run(
    config: RolloutConfig,
    what: list[Task],
    beside: Callable[[], Any] | None = None,
    within_s: float = 120,
) -> tuple[Progress, list[str]]:
    """Run rollouts, with something beside; how far they came, and what was said."""
    messages: list[str] = []

    async def all_of_it() -> Progress:
        launcher = launcher_of(config)
        async with Proxy(config.proxy) as proxy:
            agents = agents_of(config, proxy, launcher)
            rollouts = Rollouts(config, what, proxy, agents, launcher, "test", messages.append)
            acting = None if beside is None else asyncio.create_task(asyncio.to_thread(beside))
            progress = await asyncio.wait_for(rollouts.run(), within_s)
            if acting is not None:
                await acting
            return progress

    return asyncio.run(all_of_it()), messages


def rows(server: Any, config: RolloutConfig, columns: str) -> list[tuple[Any, ...]]:
    """Of each launch of these rollouts, in order."""
    with rb.connect(server.path) as connection:
        query = f"""SELECT {columns} FROM launches l JOIN trajectories t USING (trajectory_id)
                    WHERE rollout = '{config.name}' ORDER BY l.task, l.attempt"""
        return connection.execute(query).fetchall()


def running(folder: Path) -> list[int]:
    """Agents that run in a folder of launches."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(folder) in os.readlink(process / "cwd")
                and b"agent.py" in (process / "cmdline").read_bytes()
            ):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def test_agents_are_on_the_nodes_that_were_asked_for(
    cluster: Any, server: Served, config: Callable[..., RolloutConfig]
) -> None:
    """On both, and not on the head; each tells where it is."""
    settings = config(concurrency=4)
    progress, messages = run(settings, tasks(6, 0.3))
    assert (progress.done, dict(progress.by_status), messages) == (6, {"done": 6}, [])
    isolations = [orjson.loads(isolation) for (isolation,) in rows(server, settings, "l.isolation")]
    assert {entry["level"] for entry in isolations} == {"session"}
    assert {entry["node_id"] for entry in isolations} == {node.node_id for node in cluster.added}
    assert {launcher for (launcher,) in rows(server, settings, "launcher")} == {"ray"}


def test_all_nodes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run: a sweep finds nothing, and does not end the run; the first one would."""
    there = [True, False]

    def nodes_with(_: Any) -> list[Any]:
        if there.pop(0):
            return []
        raise RolloutError("no node of the Ray cluster has 1 agents")

    monkeypatch.setattr(ray_launcher, "connected", lambda: None)
    monkeypatch.setattr(ray_launcher, "nodes_with", nodes_with)

    async def sweep(launcher: ray_launcher.RayLauncher, times: int) -> list[Any]:
        return [await launcher.sweep(frozenset()) for _ in range(times)]

    early = ray_launcher.RayLauncher(Path, {"agents": 1}, "http://127.0.0.1:1", 0.0)
    assert asyncio.run(sweep(early, 2)) == [[], []]
    there.append(False)
    late = ray_launcher.RayLauncher(Path, {"agents": 1}, "http://127.0.0.1:1", 0.0)
    with pytest.raises(RolloutError, match="waited for 0 s"):
        asyncio.run(sweep(late, 1))


def test_no_node_has_what_is_asked_for(cluster: Any, config: Callable[..., RolloutConfig]) -> None:
    """It says what there is, after the time that it may take."""
    settings = config(agent={"nodes": {"resources": {"gold": 2}, "within_s": 0.5}})
    with pytest.raises(
        RolloutError, match=r"no node of the Ray cluster has 2 gold.*1 agents.*waited for 0.5 s"
    ):
        run(settings, tasks(1, 0.0))


def test_a_proxy_that_no_node_reaches(
    cluster: Any, server: Served, config: Callable[..., RolloutConfig]
) -> None:
    """Of each node the reason, in the log too."""
    settings = config(agent={"address": "http://127.0.0.1:9"}, retries={"attempts": 1, "window": 1})
    with pytest.raises(RolloutError, match=r"no node reaches the proxy at http://127\.0\.0\.1:9"):
        run(settings, tasks(1, 0.0))
    assert rows(server, settings, "l.status, t.status") == [("infra_error", "void")]


def on_ray(
    config: RolloutConfig, beside: Callable[[RayRollouts], Any] = lambda rollouts: None
) -> tuple[Progress, list[str]]:
    """Have the cluster run rollouts, with something beside; how far they came, and what was said."""
    messages: list[str] = []

    async def all_of_it() -> Progress:
        rollouts = RayRollouts(
            config, None, follow=False, resources={}, say=messages.append, tell=lambda progress: None
        )
        acting = asyncio.create_task(asyncio.to_thread(beside, rollouts))
        outcome = await asyncio.wait_for(rollouts.run(), 120)
        await acting
        return outcome

    return asyncio.run(all_of_it()), messages


def test_a_manager_that_dies_goes_on(
    cluster: Any,
    server: Served,
    config: Callable[..., RolloutConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the log: what was done is not done again, what ran is void and tried again; and soon."""
    gate = tmp_path / "gate"
    entries = [{"id": f"t{i}", "sleep": 0.4} for i in range(12)]
    entries[5]["gate"] = str(gate)  # it runs when the manager is killed, however busy the machine is
    (tmp_path / "tasks.jsonl").write_bytes(b"\n".join(map(orjson.dumps, entries)))
    own = {"launcher": "subprocess", "nodes": {}}
    settings = config(tasks=str(tmp_path / "tasks.jsonl"), concurrency=2, agent=own)
    took: list[float] = []

    def kill(rollouts: RayRollouts) -> None:
        import ray

        def ended() -> int:
            return sum(row[0] == "done" for row in rows(server, settings, "l.status"))

        manager = ray.get(rollouts.actor.pid.remote())
        _await(lambda: ended() >= 4 and (tmp_path / "gate.reached").exists())
        os.kill(manager, signal.SIGKILL)
        gate.touch()
        began, before = time.monotonic(), ended()
        _await(lambda: ended() > before)
        took.append(time.monotonic() - began)

    progress, messages = on_ray(settings, kill)
    assert (progress.done, progress.given_up) == (12, 0)
    assert any("was lost" in text for text in messages)
    launched = rows(server, settings, "l.task, l.status")
    assert sorted(task for task, status in launched if status == "done") == sorted(f"t{i}" for i in range(12))
    assert ("t5", "infra_error") in launched
    assert {status for _, status in launched} == {"done", "infra_error"}
    assert running(Path(settings.folder)) == []
    assert took[0] < 30  # it is measured by `bench rollouts`
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_manager_is_one(cluster: Any, config: Callable[..., RolloutConfig], tmp_path: Path) -> None:
    """A second one of the name is refused, and somebody who stops it is heard."""
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "sleep": 60}\n')
    settings = config(tasks=str(tmp_path / "tasks.jsonl"), agent={"launcher": "subprocess", "nodes": {}})

    def beside(rollouts: RayRollouts) -> None:
        _await(lambda: len(running(Path(settings.folder))) == 1)
        with pytest.raises(RolloutError, match="runs rollouts 'test_a_manager_is_one' already"):
            on_ray(settings)
        rollouts.stop()

    progress, _ = on_ray(settings, beside)
    assert dict(progress.by_status) == {"cancelled": 1}
    assert running(Path(settings.folder)) == []


def test_what_a_manager_cannot_do(cluster: Any, config: Callable[..., RolloutConfig]) -> None:
    """Its error is the caller's."""
    with pytest.raises(ConfigError, match="'none' is no file"):
        on_ray(config(agent={"launcher": "subprocess", "nodes": {}}))


def _await(holds: Callable[[], bool]) -> None:
    by = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < by
        time.sleep(0.02)


@pytest.mark.timeout(3600)
def test_nodes_that_die_at_random(cluster: Any, server: Served, config: Callable[..., RolloutConfig]) -> None:
    """One after the other, and others in their place: each task is done once, and the ledger stays exact.

    ROLLBOOK_KILLS=50 kills that many.
    """
    retries = {"attempts": 20, "pause_s": 0.1, "stop_share": 1.0}
    settings, dice, count = config(concurrency=4, retries=retries), random.Random(SEED), 4 + 6 * KILLS
    with ThreadPoolExecutor(1) as beside:  # only the main thread may add nodes
        running_all = beside.submit(run, settings, tasks(count, 2.0), None, 60 + 30 * KILLS)
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.0, 3.0))
            cluster.remove_node(cluster.added.pop(dice.randrange(2)), allow_graceful=False)
            add_node(cluster, resources={"agents": 1})
        progress, _ = running_all.result()
    assert (progress.done, progress.given_up) == (count, 0), f"seed {SEED}"
    launched = rows(server, settings, "l.task, l.attempt, l.status, t.status")
    done = [row[0] for row in launched if row[2] == "done"]
    assert sorted(done) == sorted(f"t{number}" for number in range(count)), f"seed {SEED}"
    assert len({row[:2] for row in launched}) == len(launched), f"seed {SEED}"
    lost = [row for row in launched if row[2] != "done"]
    assert {row[2:] for row in lost} <= {("infra_error", "void")}, f"seed {SEED}"
    assert running(Path(settings.folder)) == [], f"seed {SEED}"
    assert not any(fold_ledger(rb.open(server.path).events()).unaccounted().values()), f"seed {SEED}"


def test_a_node_that_dies(cluster: Any, server: Served, config: Callable[..., RolloutConfig]) -> None:
    """Its agents end with it, are void, and are tried again on the other node; the ledger stays exact."""
    settings, lost = config(concurrency=4), cluster.added[1]

    def kill() -> None:
        _await(lambda: len(running(Path(settings.folder))) == 4)
        cluster.remove_node(lost, allow_graceful=False)

    progress, _ = run(settings, tasks(4, 4.0), kill)
    assert (progress.done, progress.given_up) == (4, 0)
    launched = rows(server, settings, "l.status, l.attempt, t.status, l.why")
    assert [row[:3] for row in launched if row[0] == "done"].count(("done", 1, "completed")) >= 1
    again = [row for row in launched if row[0] == "infra_error"]
    assert again
    assert {row[2] for row in again} == {"void"}
    assert all("was lost" in row[3] for row in again)
    assert sum(row[0] == "done" for row in launched) == 4
    assert running(Path(settings.folder)) == []
    assert not any(fold_ledger(rb.open(server.path).events()).unaccounted().values())
