"""CONFIG files and tasks, and what an agent is told of its own."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbook.rollouts.config import load_rollouts, parse_rollouts
from rollbook.rollouts.launchers.agent_environment import (
    Address,
    command_of,
    make_folder,
    needed_by,
    placed,
    variables,
)
from rollbook.rollouts.tasks import Task, read_tasks
from rollbook.store.errors import ConfigError

LEAST: dict[str, Any] = {"tasks": "tasks.jsonl", "agent": {"command": ["true"]}}
CONTAINER = {"launcher": "docker"}


def test_a_file_and_what_overrules_it(tmp_path: Path) -> None:
    """Dotted keys, TOML values; all else has its default."""
    file = tmp_path / "rollouts.toml"
    file.write_text('tasks = "tasks.jsonl"\nsamples = 4\n[agent]\ncommand = ["python", "agent.py"]\n')
    config = load_rollouts(file, ["samples=8", 'agent.isolation="session"', "clocks.total_s=60"])
    assert (config.samples, config.agent.isolation, config.clocks.total_s) == (8, "session", 60.0)
    assert (config.name, config.concurrency, config.clocks.start_s) == ("rollouts", 32, 120.0)
    assert config.agent.command == ("python", "agent.py")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tasks": "t"}, "agent: is missing"),
        (LEAST | {"sample": 3}, "sample: unknown key"),
        (LEAST | {"samples": 0}, "samples: "),
        (LEAST | {"agent": {}}, "needs a command"),
        (
            LEAST | {"agent": {"command": ["true"], "isolation": "pidns"}},
            'agent.isolation: "pidns" is gone: name "bwrap", which has a namespace for processes and',
        ),
        (
            LEAST | {"agent": {"command": ["true"], "require": "pidns"}},
            "\"none\" (got 'pidns')",
        ),
        (LEAST | {"agent": {"launcher": "python"}}, "needs a rollout"),
        (LEAST | {"score": [{"name": "a"}]}, "needs one of function, command, url and judge"),
        (LEAST | {"score": [{"name": "a", "function": "m:f"}] * 2}, "two components have the same name"),
        (LEAST | {"name": "a b"}, "name: "),
        (LEAST | {"agent": {"launcher": "docker", "command": ["a"]}}, "needs a table [agent.container]"),
        (LEAST | {"agent": {"launcher": "http", "service": {"url": "ftp://h"}}}, "agent.service.url: "),
        (LEAST | {"agent": CONTAINER | {"container": {"image": "i", "user": "me"}}}, "container.user: "),
        (LEAST | {"agent": CONTAINER | {"container": {"image": "i", "mounts": ["/a"]}}}, "mounts.0: "),
        (LEAST | {"score": [{"name": "a", "judge": {"prompt": "p", "parse": "("}}]}, "no regular expression"),
        (LEAST | {"score": [{"name": "a", "judge": {"prompt": "p", "parse": "a"}}]}, "has 0 groups"),
        (LEAST | {"score": [{"name": "a", "url": "http://h", "command": ["a"]}]}, "needs one of function"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], reason: str) -> None:
    """With its key."""
    with pytest.raises(ConfigError) as error:
        parse_rollouts(values, "x.toml")
    assert str(error.value).startswith("x.toml:\n")
    assert reason in str(error.value)


@pytest.mark.parametrize("override", ["samples", "samples=", "agent.command.x=1"])
def test_an_override_that_is_none(tmp_path: Path, override: str) -> None:
    """The text is named."""
    file = tmp_path / "rollouts.toml"
    file.write_text('tasks = "t"\n[agent]\ncommand = ["true"]\n')
    with pytest.raises(ConfigError, match=r"samples|agent"):
        load_rollouts(file, [override])


ROWS = [{"id": "one", "prompt": "1+1?"}, {"prompt": "2+2?"}, {"id": "a b", "prompt": "3+3?"}]


def _jsonl(folder: Path) -> Path:
    (folder / "tasks.jsonl").write_bytes(b"\n".join([*map(orjson.dumps, ROWS), b""]))
    return folder / "tasks.jsonl"


def _parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "tasks.parquet")
    return folder / "tasks.parquet"


def _dataset(folder: Path) -> Path:
    """As `datasets.Dataset.save_to_disk` writes one."""
    table = pa.Table.from_pylist(ROWS)
    (folder / "set").mkdir()
    with pa.ipc.new_stream(folder / "set/data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "set/state.json").write_text("{}")
    return folder / "set"


@pytest.mark.parametrize("make", [_jsonl, _parquet, _dataset])
def test_tasks_of_files(tmp_path: Path, make: Any) -> None:
    """Named by their id, where it is a word; the same name for the same task, whatever the file."""
    tasks = read_tasks(str(make(tmp_path)))
    assert [task.values["prompt"] for task in tasks] == ["1+1?", "2+2?", "3+3?"]
    assert [task.name.partition("-")[0] for task in tasks] == ["one", "000001", "000002"]
    assert [task.name for task in read_tasks(str(tmp_path), 1)] == ["one"]


def test_tasks_of_a_function(tmp_path: Path) -> None:
    """Of a file beside, or a list in it."""
    (tmp_path / "made_tasks.py").write_text(
        "def tasks():\n    for i in range(5):\n        yield {'id': f't{i}', 'n': i}\nLIST = [{'id': 'x'}]\n"
    )
    tasks = read_tasks(f"{tmp_path}/made_tasks.py:tasks", 3)
    assert tasks == [Task(f"t{i}", {"id": f"t{i}", "n": i}) for i in range(3)]
    assert [task.name for task in read_tasks(f"{tmp_path}/made_tasks.py:LIST")] == ["x"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no task"),
        ('{"id": "a"}\n{"id": "a"}\n', "two tasks are called 'a'"),
        ("[1]\n", "task 0 is no object"),
        ('{"id": "a"}\n{oh\n', "line 2 is not JSON"),
    ],
)
def test_tasks_that_are_none(tmp_path: Path, text: str, reason: str) -> None:
    """What is wrong, and where."""
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_tasks(str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "no_such_module:tasks", "os:no_such_name"])
def test_a_source_that_is_none(source: str) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=source.partition(":")[0]):
        read_tasks(source)


def test_what_a_program_is_told(tmp_path: Path) -> None:
    """Its own trajectory's address and key by every name that clients look for; of this process only what is
    allowed; other systems' names where they are asked for."""
    values = {"command": ["run", "{prompt}", "{task}"], "environment": {"MODE": "fast"}}
    values |= {"names": {"RELAX_ROLLOUT_URL": "OPENAI_BASE_URL", "NOTHING": "NO_SUCH"}}
    agent = parse_rollouts(LEAST | {"agent": values}, "x").agent
    address = Address("http://h:1/", "mine.0.a%2Fb.0", "key-1")
    task = Task("a/b", {"prompt": "1+1?"})
    environment = variables(agent, address, "g", task, tmp_path, {"PATH": "/bin", "SECRET": "s", "LANG": "C"})
    url = "http://h:1/t/mine.0.a%252Fb.0"
    assert (
        environment["OPENAI_BASE_URL"]
        == environment["OPENAI_API_BASE"]
        == environment["RELAX_ROLLOUT_URL"]
        == f"{url}/v1"
    )
    assert (
        environment["ANTHROPIC_BASE_URL"],
        environment["OPENAI_API_KEY"],
        environment["ANTHROPIC_API_KEY"],
    ) == (*(url, "key-1", "key-1"),)
    assert (environment["PATH"], environment["LANG"], environment["MODE"], environment["HOME"]) == (
        "/bin",
        "C",
        "fast",
        str(tmp_path),
    )
    assert not {"SECRET", "NOTHING"} & environment.keys()
    assert command_of(placed(agent.command), task) == ("run", "1+1?", "a/b")


def test_an_environments_interpreter_is_itself_and_seen_with_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link leads to another interpreter, which has none of them; a file beside is seen with its folder."""
    monkeypatch.chdir(tmp_path)
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    (tmp_path / "agent.py").write_text("import sys; print(sys.prefix)")
    command = placed(("env/bin/python", "agent.py"))
    assert command == (str(tmp_path / "env/bin/python"), str(tmp_path / "agent.py"))
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(tmp_path / "env")
    environment, base = needed_by(Path(command[0]))
    assert (environment, (base / "bin").is_dir()) == (tmp_path / "env", True)
    assert needed_by(Path(command[1])) == [tmp_path]


def test_positions_of_a_taskset_are_tasks() -> None:
    """So many as are said."""
    tasks = read_tasks("range:3")
    assert [(task.name, task.values) for task in tasks] == [
        (str(n), {"id": str(n), "idx": n}) for n in range(3)
    ]
    assert len(read_tasks("range:300", limit=2)) == 2


def test_a_launch_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """For nobody else, with its task; it is never one that is there."""
    make_folder(tmp_path / "a/b", Task("t", {"prompt": "x"}))
    assert orjson.loads((tmp_path / "a/b/task.json").read_bytes()) == {"prompt": "x"}
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a/b", Task("t", {}))
