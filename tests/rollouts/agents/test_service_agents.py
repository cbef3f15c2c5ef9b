"""Agents of a real service in another process: started once, asked after, cancelled, given up by a lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.agents import service as agent_service
from tests.fakes.processes.rollout_runs import columns_of, launches, run, tasks
from tests.fakes.proxies.served import Served

from rollbook.rollouts.config import RolloutConfig, load_rollouts, parse_rollouts
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError
from rollbook.testing.asgi import free_port

PROGRAM = agent_service.__file__


class Service:
    """The service, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.log, self.port = folder / "service.log", free_port()
        self.log.touch()
        self.url = f"http://127.0.0.1:{self.port}/agents"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen([sys.executable, PROGRAM, str(self.port), str(self.log)])
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                httpx.get(f"{self.url}/none")
            except httpx.HTTPError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("it did not start")

    def kill(self) -> None:
        """End it, and its agents with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def told(self) -> list[list[str]]:
        """Its log."""
        return [line.split() for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer", "--no-seal")


@pytest.fixture(scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of all tests here."""
    running = Service(tmp_path_factory.mktemp("service"))
    yield running
    running.kill()


@pytest.fixture
def service(one_service: Service) -> Service:
    """A service that runs, and has nothing in its log."""
    if one_service.process.poll() is not None:
        one_service.start()
    one_service.log.write_text("")
    return one_service


@pytest.fixture
def config(
    server: Served, service: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., RolloutConfig]:
    """Makes a CONFIG under this test's name."""

    def make(lease_s: float = 5.0, **changes: Any) -> RolloutConfig:
        agent = {"launcher": "http", "service": {"url": service.url, "poll_s": 0.05, "lease_s": lease_s}}
        values = {"proxy": server.url, "tasks": "none", "folder": str(tmp_path / "launches"), "agent": agent}
        values |= {"retries": {"pause_s": 0.01, "attempts": 2}, "name": _word(request.node.name)}
        return parse_rollouts(values | changes, "test")

    return make


def _word(name: str) -> str:
    return "".join(c for c in name if c.isalnum() or c == "_")[:60]


def _in_time(true: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_agents_of_every_kind(server: Served, config: Callable[..., RolloutConfig], service: Service) -> None:
    """Each ends with its status; what it said of itself is its reward, as a class's."""
    settings = config()
    progress, _ = run(settings, tasks("answer", "at once", "exit", "nonsense"))
    rows = [row for row in launches(server, settings.name) if row["attempt"] == 1]
    assert columns_of(rows, "status", "finished", "reward", "turns") == [
        ("done", "completed", 0.75, 1),
        ("done", "completed", 0.75, 1),
        ("agent_error", "failed", None, 1),
        ("infra_error", "void", None, 1),
    ]
    assert rows[2]["why"] == "it could not"
    assert rows[3]["why"].startswith("its service answered what docs/rollouts.md does not have: status: ")
    assert (progress.done, progress.given_up) == (4, 1)
    assert {words[0] for words in service.told()} == {"start"}


def test_a_clock_that_runs_out(
    server: Served, config: Callable[..., RolloutConfig], service: Service
) -> None:
    """The agent is cancelled at the service."""
    settings = config(clocks={"total_s": 1.0})
    run(settings, tasks("wait"))
    assert columns_of(launches(server, settings.name), "status", "finished") == [("timeout", "failed")]
    assert [words[0] for words in service.told()] == ["start", "cancel"]


def test_a_request_without_an_answer_is_repeated_and_starts_nothing_twice(
    server: Served, config: Callable[..., RolloutConfig], service: Service
) -> None:
    """By the key of its launch."""
    settings = config()
    run(settings, tasks("lose"))
    assert columns_of(launches(server, settings.name), "status", "attempt", "turns") == [("done", 1, 1)]
    assert [words[0] for words in service.told()] == ["start"]


def test_what_it_refuses_is_said(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """It is tried again, as everything that is not the agent's fault."""
    settings = config()
    progress, _ = run(settings, tasks("refuse"))
    rows = launches(server, settings.name)
    assert (
        columns_of(rows, "status", "why")
        == [("infra_error", "its service answered 422: no such task here")] * 2
    )
    assert progress.given_up == 1


def test_a_token_is_sent(
    server: Served, config: Callable[..., RolloutConfig], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named in the CONFIG, and never written there."""
    token = {"url": service.url, "poll_s": 0.05, "token_variable": "ROLLBOOK_TEST_TOKEN"}
    settings = config(agent={"launcher": "http", "service": token})
    with pytest.raises(ConfigError, match="'ROLLBOOK_TEST_TOKEN' is not set"):
        run(settings, tasks("answer"))
    monkeypatch.setenv("ROLLBOOK_TEST_TOKEN", "sesame")
    run(settings, tasks("answer"))
    assert service.told()[0][-2:] == ["Bearer", "sesame"]


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (True, "its service does not know it any more"),
        (False, "its service gave no good answer for 1 s"),
    ],
)
def test_a_service_that_is_killed(
    server: Served, config: Callable[..., RolloutConfig], service: Service, again: bool, why: str
) -> None:
    """Started again it does not know its agents; where it stays away its lease runs out."""
    settings = config(lease_s=30.0 if again else 1.0, retries={"attempts": 1})
    beside: list[asyncio.Task[None]] = []

    async def kill() -> None:
        while not service.told():
            await asyncio.sleep(0.05)
        service.kill()
        if again:
            await asyncio.to_thread(service.start)

    progress, _ = run(
        settings, tasks("wait"), lambda _: beside.append(asyncio.get_running_loop().create_task(kill()))
    )
    (row,) = launches(server, settings.name)
    assert (row["status"], row["finished"], progress.given_up) == ("infra_error", "void", 1)
    assert row["why"].startswith(why)


def test_a_stop_cancels_what_runs(
    server: Served, config: Callable[..., RolloutConfig], service: Service
) -> None:
    """At the service, too."""
    settings = config()
    beside: list[asyncio.Task[None]] = []

    async def stop(rollouts: Rollouts) -> None:
        while len([row for row in launches(server, settings.name) if row["turns"]]) < 2:
            await asyncio.sleep(0.1)
        rollouts.stop()

    progress, _ = run(
        settings,
        tasks("wait", "wait"),
        lambda rollouts: beside.append(asyncio.get_running_loop().create_task(stop(rollouts))),
    )
    assert progress.by_status == Counter(cancelled=2)
    assert Counter(words[0] for words in service.told()) == Counter(start=2, cancel=2)


@pytest.mark.more
@pytest.mark.parametrize("lease_s", [60.0, 1.0])
def test_rollouts_that_are_killed(server: Served, service: Service, tmp_path: Path, lease_s: float) -> None:
    """Their agents are cancelled when they go on, or by their own lease before that; nothing runs twice."""
    name = f"killed{lease_s:g}"
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "do": "wait"}\n')
    file = tmp_path / "r.toml"
    file.write_text(
        f'name = "{name}"\nproxy = "{server.url}"\ntasks = "{tmp_path}/tasks.jsonl"\n'
        f'folder = "{tmp_path}/launches"\n[agent]\nlauncher = "http"\n'
        f'[agent.service]\nurl = "{service.url}"\npoll_s = 0.05\nlease_s = {lease_s}\n'
    )
    process = subprocess.Popen([sys.executable, "-m", "rollbook", "rollout", str(file)])
    assert _in_time(lambda: any(row["turns"] for row in launches(server, name)), 60)
    process.kill()
    process.wait()
    if lease_s < 10:
        assert _in_time(lambda: service.told()[-1][0] == "lease")
    progress, _ = run(load_rollouts(file), [Task("a", {"do": "answer"})])
    rows = launches(server, name)
    assert columns_of(rows, "attempt", "status", "finished") == [
        (1, "infra_error", "void"),
        (2, "done", "completed"),
    ]
    assert rows[0]["why"] == "the process that ran it ended"
    assert progress.done == 1
    kinds = [words[0] for words in service.told()]
    assert kinds == ["start", "cancel" if lease_s > 10 else "lease", "start"]
