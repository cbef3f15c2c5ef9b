"""Tasks of Harbor: read from folders in its published form, played on this host, scored by their tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.rollouts.agents.harbor import places_of, reward_in
from rollbook.rollouts.config import parse_rollouts
from rollbook.rollouts.launchers import isolation
from rollbook.rollouts.launchers.agents import agents_of, launcher_of
from rollbook.rollouts.proxy import Proxy
from rollbook.rollouts.rollouts import Rollouts
from rollbook.rollouts.tasks import read_tasks
from rollbook.store.errors import ConfigError, LaunchError, RolloutError

CONFIG = """\
version = "1.0"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
"""
DOCKERFILE = """\
# What there is at the beginning.
FROM python:3.12-slim
WORKDIR /work
COPY *.txt ./
COPY data /work/data/
"""
TESTS = """\
#!/bin/bash
# It starts where the container does.
test "$PWD" = /work && test -f /tests/expected.txt || exit 1
if diff -q greeting.txt /tests/expected.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo '{"reward": 0.25, "lines": 3}' > /logs/verifier/reward.json
fi
"""
AGENT = """\
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": os.environ["WORD"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                 {"content-type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
assert open("/work/data/more.csv").read() == "1,2"
open("/work/greeting.txt", "w").write(said)
open("/logs/verifier/reward.txt", "w").write("100")
"""
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a folder with one task in it."""

    def made(dockerfile: str = DOCKERFILE, config: str = CONFIG) -> Path:
        task = tmp_path / "tasks" / "greet"
        (task / "environment" / "data").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text(config)
        (task / "instruction.md").write_text("Write `1: hello` to greeting.txt.\n")
        (task / "environment" / "Dockerfile").write_text(dockerfile)
        (task / "environment" / "notes.txt").write_text("notes")
        (task / "environment" / "data" / "more.csv").write_text("1,2")
        (task / "tests" / "test.sh").write_text(TESTS)
        (task / "tests" / "expected.txt").write_text("1: hello")
        return tmp_path / "tasks"

    return made


def test_a_folder_of_tasks_is_read(make: Make) -> None:
    """By what it holds; the instruction is the prompt."""
    [task] = read_tasks(str(make()))
    assert (task.name, task.values["prompt"]) == ("greet", "Write `1: hello` to greeting.txt.\n")
    assert (task.values["workdir"], task.values["image"]) == ("/work", None)
    assert task.values["metadata"] == {"difficulty": "easy"}


def test_its_files_are_placed_as_its_dockerfile_says(make: Make, tmp_path: Path) -> None:
    """In the launch's own folder."""
    [task] = read_tasks(str(make()))
    places = places_of(task, tmp_path / "launch")
    assert places == {f"/{name}": tmp_path / "launch" / "harbor" / name for name in ("logs", "work")}
    files = sorted(p.relative_to(places["/work"]) for p in places["/work"].rglob("*") if p.is_file())
    assert list(map(str, files)) == ["data/more.csv", "notes.txt"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("RUN apt-get install -y cowsay", "needs 'RUN apt-get install -y cowsay', and a container"),
        ("COPY notes.txt /usr/share/", "has files in /usr, and needs a container"),
        ("COPY gone.txt .", "COPY gone.txt: there is no such file"),
    ],
)
def test_what_is_more_than_files_needs_a_container(line: str, why: str, make: Make, tmp_path: Path) -> None:
    """And is not begun."""
    [task] = read_tasks(str(make(f"FROM debian\n{line}\n")))
    with pytest.raises(LaunchError, match=why):
        places_of(task, tmp_path / "launch")


def test_a_copy_stays_within_the_launchs_folder(make: Make, tmp_path: Path) -> None:
    """Wherever it says that it goes."""
    [task] = read_tasks(str(make("FROM debian\nWORKDIR /../../..\nCOPY notes.txt ../../../x/\n")))
    assert set(places_of(task, tmp_path / "launch")) == {"/logs", "/x"}
    assert (tmp_path / "launch" / "harbor" / "x" / "notes.txt").exists()


def test_a_task_that_cannot_be_read_is_named(make: Make) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match="greet is no task of Harbor"):
        read_tasks(str(make(config="version = ")))


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [("reward.txt", "0.5\n", 0.5), ("reward.json", '{"passed": 1}', 1.0), ("reward.json", "2", 2.0)],
)
def test_rewards_are_read(name: str, text: str, reward: float, tmp_path: Path) -> None:
    """A number, or an object of one."""
    (tmp_path / name).write_text(text)
    assert reward_in(tmp_path) == reward


@pytest.mark.parametrize("text", ["", "true", "NaN", '{"a": 1, "b": 2}', '{"reward": "1"}'])
def test_what_is_no_reward_is_none(text: str, tmp_path: Path) -> None:
    """And what the tests printed is said."""
    (tmp_path / "reward.json").write_text(text)
    with pytest.raises(RolloutError, match="the tests printed: no such module"):
        reward_in(tmp_path, "no such module")


@pytest.mark.skipif(isolation.missing("bwrap") is not None, reason="bubblewrap does not work here")
def test_a_task_is_played_and_its_tests_are_the_reward(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, make: Make, tmp_path: Path
) -> None:
    """At a container's paths; a reward that the agent wrote itself counts for nothing."""
    options = [
        "--model",
        str(text_model("chatml")),
        "--engine",
        "scripted",
        "--script",
        f"{script}:answer",
        "--no-seal",
    ]
    server = serve(*options)
    (tmp_path / "agent.py").write_text(AGENT)
    score = [{"name": "tests", "function": "rollbook.rollouts.agents.harbor:tests"}]

    def rolled(word: str) -> list[Any]:
        command = ["python3", str(tmp_path / "agent.py")]
        agent = {"command": command, "environment": {"WORD": word}}
        values = {"name": word, "proxy": server.url, "folder": str(tmp_path / "launches"), "agent": agent}
        config = parse_rollouts(values | {"tasks": str(tmp_path / "tasks"), "score": score}, "test")

        async def run() -> None:
            async with Proxy(config.proxy) as proxy:
                launcher = launcher_of(config)
                agents = agents_of(config, proxy, launcher)
                await Rollouts(config, read_tasks(config.tasks), proxy, agents, launcher, "test").run()

        asyncio.run(run())
        with rb.connect(server.path) as connection:
            query = """
                SELECT l.status, t.reward, l.scoring FROM launches l JOIN trajectories t USING (trajectory_id)
                WHERE l.rollout = $1"""
            return connection.execute(query, [word]).fetchall()

    make()
    assert rolled("hello") == [("done", 1.0, '{"tests":1.0}')]
    assert rolled("goodbye") == [("done", 0.25, '{"tests":0.25}')]
