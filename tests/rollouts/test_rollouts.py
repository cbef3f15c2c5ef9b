"""Rollouts against a real proxy: programs and classes, what fails, what is stopped, and what goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.processes.rollout_runs import columns_of, launches, run, tasks
from tests.fakes.processes.warm import LIGHT, WarmProcess
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.rollouts.config import RolloutConfig, load_rollouts, parse_rollouts
from rollbook.rollouts.jobs import Watch
from rollbook.rollouts.places import LABEL, Place
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import RolloutError
from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import samples_of

AGENT = """
import json, os, signal, subprocess, sys, time, urllib.request

task = json.load(open(os.environ["ROLLBOOK_TASK_FILE"]))


def post(url, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))


def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]


what = task["do"]
if what == "answer":
    open("answer.txt", "w").write(ask("hello"))
elif what == "finish":
    ask("hello")
    post(os.environ["ROLLBOOK_FINISH_URL"], {"reward": 0.25})
elif what == "exit":
    ask("hello")
    sys.exit(3)
elif what == "mute":
    pass
elif what == "boom":
    ask("boom")
elif what == "flaky":
    # The engine fails for the first attempt alone.
    ask("hello" if os.environ["ROLLBOOK_TRAJECTORY_ID"].endswith(".2") else "boom")
elif what == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ask("hello")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
elif what == "heed":
    # Asked to end, it puts its things in order first.
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), open("bye.txt", "w").close(), sys.exit(0)))
    ask("hello")
    time.sleep(600)
elif what == "wait":
    ask("hello")
    open("waits.txt", "w").close()
    time.sleep(600)
elif what == "daemon":
    ask("hello")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
elif what == "print":
    ask("hello")
    for _ in range(64):
        sys.stdout.write("x" * (1 << 20))
"""
OWN = '''
import asyncio, time
from rollbook.rollouts.agents.agentic import AgenticRollout, EnvRollout, ToolRollout
from rollbook.rollouts.outcome import Outcome


class Says(AgenticRollout):
    closed = []

    def __init__(self, times=1):
        self.times = times

    async def run(self, task, llm):
        what = task.values["do"]
        for _ in range(self.times):
            said = await llm.chat([{"role": "user", "content": what}])
        if what == "raise":
            raise KeyError("mine")
        if what == "parts":
            return Outcome({"form": 0.25, "sense": 0.5}, success=True)
        if what == "hang":
            await asyncio.sleep(600)
        return float(len(said["content"]))

    async def close(self):
        self.closed.append(1)


class Team(AgenticRollout):
    async def run(self, task, llm):
        critic = llm.sub("critic")
        first = {"role": "user", "content": task.values["do"]}
        for one in (llm, critic, critic.sub("reader")):
            said = await one.chat([first])
        again = await critic.chat([first, critic.replies[0]["choices"][0]["message"], first])
        return Outcome(0.5, turn_rewards={critic.replies[1]["id"]: 2.0})


class Tools(ToolRollout):
    tool_timeout_s = 0.2

    def messages(self, task):
        return [{"role": "user", "content": task.values["do"]}]

    def schemas(self, task):
        return [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]

    def tools(self, task):
        return {"calc": self.calc} if task.values["do"] == "call two" else {}

    def calc(self, a, b):
        if len(b) > 1:
            time.sleep(1)
        return f"sum {a}{b}"

    def score(self, task, answer):
        return float(answer.count("sum 1"))


class Counts:
    """As gym's."""

    def __init__(self):
        self.turn = 0

    def reset(self):
        return "begin", {}

    def step(self, action):
        self.turn += 1
        return f"turn {self.turn}", 0.5, self.turn == 3, False, {}


class Plays(EnvRollout):
    def make_env(self, task):
        return Counts()


def length(task, attempt):
    return float(len((attempt.folder / "answer.txt").read_text()))


def fails(task, attempt):
    raise RuntimeError("no judge")
'''


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer", "--no-seal")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the agents' files are."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
    (folder / "own_agents.py").write_text(OWN)
    return folder


@pytest.fixture
def config(server: Any, beside: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Makes a CONFIG under this test's name."""

    def make(**changes: Any) -> RolloutConfig:
        agent = {"command": [sys.executable, "-S", str(beside / "agent.py")], "isolation": "session"}
        values = {"name": "r", "proxy": server.url, "tasks": "none", "folder": str(tmp_path / "launches")}
        values |= {"retries": {"pause_s": 0.01}, "clocks": {"grace_s": 0.2}, "agent": agent}
        name = "".join(c for c in request.node.name if c.isalnum() or c in "_.")[:60]
        return parse_rollouts(values | {"name": name} | changes, "test")

    return make


def own(beside: Path, name: str, **options: Any) -> dict[str, Any]:
    """`[agent]` of a class of this file's."""
    return {"launcher": "python", "rollout": f"{beside}/own_agents.py:{name}", "options": options}


# Programs -----------------------------------------------------------------------------------------


def test_programs_of_every_kind(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """Each ends with its status, its trajectory with what follows from it, and nothing of it runs."""
    settings = config(
        clocks={"total_s": 6.0, "start_s": 5.0, "grace_s": 0.2},
        agent={
            "command": config().agent.command,
            "isolation": "session",
            "limits": {"output_mb": 0.5},
        },
        score=[
            {"name": "length", "function": f"{Path(config().agent.command[-1]).parent}/own_agents.py:length"}
        ],
    )
    progress, messages = run(settings, tasks("answer", "exit", "mute", "hang", "daemon", "print"))
    rows = launches(server, settings.name)
    assert columns_of(rows, "status", "finished", "reward", "exit_code", "leaked") == [
        ("done", "completed", 8.0, 0, 0),
        ("agent_error", "failed", None, 3, 0),
        ("agent_error", "failed", None, 0, 0),
        ("timeout", "failed", None, None, 1),
        ("done", "completed", None, 0, 1),
        ("done", "completed", None, 0, 0),
    ]
    assert rows[2]["why"] == "it ended without a request"
    assert rows[3]["why"] == "its total clock ran out"
    # A scorer that fails is no reward of 0, and says why.
    assert orjson.loads(rows[0]["scoring"]) == {"length": 8.0}
    assert "answer.txt" in orjson.loads(rows[4]["scoring"])["length"]["error"]
    assert any("scorer length failed" in line for line in messages)
    printed = orjson.loads(rows[5]["output"])["stdout"]
    assert (printed["bytes"], printed["kept"]) == (64 << 20, 1 << 19)
    assert (progress.done, progress.given_up, progress.leaked) == (6, 0, 2)
    assert progress.by_status == Counter(done=3, agent_error=2, timeout=1)


def test_what_the_engine_failed_is_tried_again(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """As another trajectory of the same group; the one that failed is void, and no reward of 0."""
    settings = config(samples=2, retries={"pause_s": 0.01, "attempts": 2})
    progress, messages = run(settings, tasks("flaky", "boom"))
    rows = launches(server, settings.name)
    flaky, boom = ([row for row in rows if row["task"].endswith(kind)] for kind in ("flaky", "boom"))
    assert columns_of(flaky, "sample", "attempt", "status", "split", "finished") == [
        (0, 1, "infra_error", "void", "void"),
        (0, 2, "done", "train", "completed"),
        (1, 1, "infra_error", "void", "void"),
        (1, 2, "done", "train", "completed"),
    ]
    assert len({row["group"] for row in flaky}) == 1
    assert "its last request failed" in flaky[0]["why"]
    assert (
        columns_of(boom, "attempt", "status", "split")
        == [(1, "infra_error", "void"), (2, "infra_error", "void")] * 2
    )
    assert (progress.done, progress.given_up) == (4, 2)
    assert sum("given up after 2 attempts" in line for line in messages) == 2


def test_what_the_proxys_absence_ended_is_tried_again(
    server: Served, config: Callable[..., RolloutConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the attempts, and counted; no other infrastructure is suspected."""
    of_watch, count = Watch.seen, itertools.count()
    # How an agent that failed ended is looked at once.
    monkeypatch.setattr("rollbook.rollouts.rollouts.unsure", lambda ended, seen: False)
    monkeypatch.setattr(
        Watch, "seen", lambda watch, launch: replace(of_watch(watch, launch), away=next(count) < 4)
    )
    settings = config(retries={"pause_s": 0.01, "attempts": 1, "window": 2})
    progress, messages = run(settings, tasks("exit"))
    rows = launches(server, settings.name)
    lost = [(number, "infra_error") for number in (1, 2, 3, 4)]
    assert columns_of(rows, "attempt", "status") == [*lost, (5, "agent_error")]
    assert (progress.done, progress.again, progress.given_up) == (1, 4, 0)
    assert messages == ["the proxy was away: launches that failed because of it are tried again"]


def test_a_log_that_comes_late_changes_no_verdict(
    server: Served, config: Callable[..., RolloutConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an agent asked, and whose fault its end is, is known once all is read that the log has then."""
    monkeypatch.setattr("rollbook.rollouts.rollouts.SETTLE_S", 0.1)
    of_proxy = Proxy.batches

    async def late(proxy: Proxy, *arguments: Any) -> Any:
        async for batch in of_proxy(proxy, *arguments):
            await asyncio.sleep(0.2)
            yield batch

    monkeypatch.setattr(Proxy, "batches", late)
    settings = config(retries={"attempts": 1})
    run(settings, tasks("answer", "exit", "boom", "mute"))
    assert columns_of(launches(server, settings.name), "status", "why") == [
        ("done", None),
        ("agent_error", "it exited with 3"),
        ("infra_error", "its last request failed; it exited with 1"),
        ("agent_error", "it ended without a request"),
    ]


def test_an_agent_that_finishes_itself(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """Its reward is its own; asked again nothing is run a second time."""
    settings = config()
    progress, _ = run(settings, tasks("finish"))
    assert (progress.done, progress.by_status) == (1, {"done": 1})
    again, _ = run(settings, tasks("finish"))
    assert (again.done, again.by_status) == (1, {})
    assert columns_of(launches(server, settings.name), "status", "reward", "attempt") == [("done", 0.25, 1)]


def test_a_program_scores(server: Served, config: Callable[..., RolloutConfig], beside: Path) -> None:
    """By its last line; components are weighed, and each is a source of its own."""
    command = ["sh", "-c", "echo noise; echo '{\"reward\": 2}'; test -s answer.txt"]
    components = [
        {"name": "by_program", "command": command, "weight": 0.5},
        {"name": "length", "function": f"{beside}/own_agents.py:length", "weight": 10.0},
    ]
    settings = config(score=components)
    run(settings, tasks("answer"))
    (row,) = launches(server, settings.name)
    assert (row["reward"], orjson.loads(row["scoring"])) == (81.0, {"by_program": 2.0, "length": 8.0})
    with rb.connect(server.path) as connection:
        query = "SELECT source, reward FROM rewards WHERE trajectory = $1 ORDER BY source"
        rewards = connection.execute(query, [row["trajectory"]]).fetchall()
    assert rewards == [("agent", 81.0), ("by_program", 2.0), ("length", 8.0)]


def test_a_judge_that_fails_is_no_reward_of_0(
    server: Served, config: Callable[..., RolloutConfig], beside: Path
) -> None:
    """Not even where another component has a number."""
    names = ("length", "fails")
    settings = config(score=[{"name": n, "function": f"{beside}/own_agents.py:{n}"} for n in names])
    run(settings, tasks("answer"))
    (row,) = launches(server, settings.name)
    assert (row["status"], row["reward"]) == ("done", None)
    assert orjson.loads(row["scoring"]) == {"length": 8.0, "fails": {"error": "RuntimeError: no judge"}}


# Classes ------------------------------------------------------------------------------------------


def test_a_class_is_as_a_program(server: Served, config: Callable[..., RolloutConfig], beside: Path) -> None:
    """Its trajectories, rewards and failures are those of programs."""
    settings = config(agent=own(beside, "Says", times=2), clocks={"total_s": 2.0, "grace_s": 0.1})
    progress, _ = run(settings, tasks("hello", "raise", "parts", "hang", "boom"))
    rows = [row for row in launches(server, settings.name) if row["attempt"] == 1]
    assert columns_of(rows, "status", "finished", "reward", "turns") == [
        ("done", "completed", 8.0, 2),
        ("agent_error", "failed", None, 2),
        ("done", "completed", 0.75, 2),
        ("timeout", "failed", None, 2),
        ("infra_error", "void", None, 0),
    ]
    assert rows[1]["why"] == "KeyError('mine')"
    assert progress.given_up == 1


def test_agents_that_an_agent_starts_are_of_its_trajectory(
    server: Served, config: Callable[..., RolloutConfig], beside: Path
) -> None:
    """Each has paths of its own, the same reward, and a name; the group has one member."""
    settings = config(agent=own(beside, "Team"), samples=2)
    run(settings, tasks("hello"))
    rows = launches(server, settings.name)
    assert columns_of(rows, "status", "reward", "turns") == [("done", 0.5, 4)] * 2
    assert len({row["group"] for row in rows}) == 1
    with rb.connect(server.path) as connection:
        query = """
            SELECT request ->> '$.metadata.agent', parent_turn_id IS NULL, reward FROM turns
            WHERE trajectory = $1 ORDER BY seq"""
        turns = connection.execute(query, [rows[0]["trajectory"]]).fetchall()
    assert turns == [
        (None, True, None),
        ("critic", True, None),
        ("critic/reader", True, None),
        ("critic", False, 2.0),
    ]
    log = fold(rb.open(server.path).events()).values()
    [trajectory] = [entry for entry in log if entry.opened.name == rows[0]["trajectory"]]
    samples = list(samples_of(trajectory))
    assert [sample.reward for sample in samples] == [0.5] * 3
    assert len({sample.group for sample in samples}) == 1
    assert sorted(value for sample in samples for value in sample.rewards.values()) == [2.0]


def test_tools_are_called_side_by_side(
    server: Served, config: Callable[..., RolloutConfig], beside: Path
) -> None:
    """What one returns, how long it may take, and that there is none, is told to the policy."""
    settings = config(agent=own(beside, "Tools"))
    run(settings, tasks("call two", "call"))
    rows = launches(server, settings.name)
    assert columns_of(rows, "status", "turns") == [("done", 2), ("done", 2)]
    with rb.connect(server.path) as connection:
        query = "SELECT new_messages FROM turns WHERE trajectory = $1 ORDER BY seq DESC LIMIT 1"
        messages = [connection.execute(query, [row["trajectory"]]).fetchall()[0][0] for row in rows]
    assert messages[0].count("sum 1é") == 2
    assert "there is no tool 'calc'" in messages[1]


def test_an_environment_is_played(server: Served, config: Callable[..., RolloutConfig], beside: Path) -> None:
    """What it observes is said to the policy; its rewards are the turns'."""
    settings = config(agent=own(beside, "Plays"))
    run(settings, tasks("anything"))
    (row,) = launches(server, settings.name)
    assert (row["status"], row["reward"], row["turns"]) == ("done", 1.5, 3)
    with rb.connect(server.path) as connection:
        query = "SELECT reward FROM rewards WHERE trajectory = $1 AND turn_id IS NOT NULL"
        assert connection.execute(query, [row["trajectory"]]).fetchall() == [(0.5,)] * 3


# What ends them, and what goes on -----------------------------------------------------------------


def test_a_stop_cancels_what_runs(
    server: Served, config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    """Those are void, and are run when the rollouts go on."""
    settings = config(concurrency=2)
    beside: list[asyncio.Task[None]] = []

    async def stop(rollouts: Rollouts) -> None:
        while len(list(tmp_path.rglob("waits.txt"))) < 2:
            await asyncio.sleep(0.05)
        rollouts.stop()

    progress, _ = run(
        settings,
        tasks("wait", "wait", "answer"),
        lambda rollouts: beside.append(asyncio.get_running_loop().create_task(stop(rollouts))),
    )
    assert (progress.done, progress.by_status) == (0, {"cancelled": 2})
    assert columns_of(launches(server, settings.name), "status", "split") == [("cancelled", "void")] * 2
    again, _ = run(settings, [Task(task.name, {"do": "answer"}) for task in tasks("wait", "wait", "answer")])
    assert (again.done, again.by_status) == (3, {"done": 3})


def test_a_stop_waits_for_no_trajectory_that_is_held(
    server: Served, config: Callable[..., RolloutConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An online training may admit none for minutes."""

    stops: list[Any] = []
    waiting: list[Any] = []

    async def held(*names: Any) -> None:
        waiting.append(names)
        if len(waiting) == 2:
            asyncio.get_running_loop().call_later(0.1, stops[0])
        await asyncio.sleep(600)

    monkeypatch.setattr(Proxy, "open", held)
    began = time.monotonic()
    progress, _ = run(
        config(concurrency=2), tasks("answer", "answer"), lambda rollouts: stops.append(rollouts.stop)
    )
    assert time.monotonic() - began < 30
    assert (progress.done, progress.by_status) == (0, {"cancelled": 2})


def test_a_launcher_that_is_not_there_stops_all(server: Served, config: Callable[..., RolloutConfig]) -> None:
    """A program that cannot be started is no agent's fault; many of them stop the rollouts."""
    settings = config(
        samples=8,
        agent={"command": ["no-such-program"], "isolation": "session"},
        retries={"attempts": 9, "window": 6, "pause_s": 0.0},
        concurrency=2,
    )
    with pytest.raises(RolloutError, match=r"of the last 6 launches failed .*no-such-program"):
        run(settings, tasks("answer"))
    rows = launches(server, settings.name)
    assert 6 <= len(rows) <= 8
    assert {(row["status"], row["split"]) for row in rows} == {("infra_error", "void")}


@pytest.fixture
def killed(server: Served, beside: Path, tmp_path: Path) -> RolloutConfig:
    """A CONFIG whose rollouts were killed with -9 in the middle, by their process."""
    file = tmp_path / "killed.toml"
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "do": "finish"}\n{"id": "b", "do": "wait"}\n')
    command = [sys.executable, "-S", str(beside / "agent.py")]
    file.write_text(
        f'name = "killed"\nproxy = "{server.url}"\ntasks = "{tmp_path}/tasks.jsonl"\n'
        f'folder = "{tmp_path}/launches"\n[agent]\ncommand = {orjson.dumps(command).decode()}\n'
    )
    words = [sys.executable, "-m", "rollbook", "rollout", str(file)]
    process = WarmProcess(words, modules=(*LIGHT, "rollbook.cli.online.rollout"))
    by = time.monotonic() + 30
    while not list(tmp_path.rglob("waits.txt")) or ("done",) not in columns_of(
        launches(server, "killed"), "status"
    ):
        assert time.monotonic() < by
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return load_rollouts(file)


def test_what_a_clock_ends_is_asked_first(
    server: Served, config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    """It has its grace."""
    settings = config(clocks={"total_s": 1.0, "grace_s": 20.0})
    begun = time.monotonic()
    run(settings, tasks("heed"))
    assert columns_of(launches(server, settings.name), "status", "exit_code") == [("timeout", 0)]
    assert len(list(tmp_path.rglob("bye.txt"))) == 1
    assert time.monotonic() - begun < 15


def test_what_is_idle_ends_long_before_its_other_clocks(
    server: Served, config: Callable[..., RolloutConfig]
) -> None:
    """The clock begins with its first request, whatever was waited for until then."""
    settings = config(clocks={"start_s": 40.0, "total_s": 40.0, "idle_s": 0.4, "grace_s": 0.2})
    begun = time.monotonic()
    run(settings, tasks("wait"))
    assert columns_of(launches(server, settings.name), "status", "why") == [
        ("timeout", "its idle clock ran out")
    ]
    assert time.monotonic() - begun < 20


def test_it_goes_on_after_a_kill(server: Served, killed: RolloutConfig) -> None:
    """What ended is not run again; what ran is gone, told of, and run again; nothing is left running."""
    progress, _ = run(killed, [Task("a", {"do": "finish"}), Task("b", {"do": "answer"})])
    rows = launches(server, "killed")
    assert columns_of(rows, "task", "attempt", "status", "split") == [
        ("a", 1, "done", "train"),
        ("b", 1, "infra_error", "void"),
        ("b", 2, "done", "train"),
    ]
    assert rows[1]["why"] == "the process that ran it ended"
    assert progress.done == 2


def test_it_goes_on_after_a_death_before_a_launch(
    server: Served, config: Callable[..., RolloutConfig]
) -> None:
    """A trajectory that was opened and never launched is void, and its name is not used again."""
    settings = config()
    (task,) = tasks("answer")
    name = Place(0, task.name, 0).trajectory(settings.name, 1)

    async def only_opens() -> None:
        async with Proxy(settings.proxy) as proxy:
            await proxy.open(name, "g", task.name, "train", {LABEL: settings.name})

    asyncio.run(only_opens())
    progress, _ = run(settings, [task])
    assert progress.by_status == {"done": 1}
    assert columns_of(launches(server, settings.name), "attempt", "status") == [(2, "done")]
    with rb.connect(server.path) as connection:
        query = "SELECT status, split FROM trajectories WHERE trajectory = $1"
        assert connection.execute(query, [name]).fetchall() == [("void", "void")]
