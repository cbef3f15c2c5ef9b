"""The tasks of rollouts, made by a function or read from files, among them folders as Harbor has them:
`task.toml`, `instruction.md`, `environment/` and `tests/test.sh`."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.digest import digest_json
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.load_object import load_object

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RANGE = re.compile(r"range:([0-9]{1,9})")
NAMED_BY = ("id", "task_id", "name")
"""Keys whose value names a task, where it is a short word."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task.

    Attributes:
        name: unique among the tasks; a short word.
        values: what it says, as JSON.
    """

    name: str
    values: Json


def read_tasks(source: str, limit: int | None = None) -> list[Task]:
    """The tasks that a source names, the first `limit`.

    Raises:
        ConfigError: there is none, or it cannot be read; or two have the same name.
    """
    tasks: dict[str, Task] = {}
    for number, values in enumerate(itertools.islice(_values(source), limit)):
        if not isinstance(values, dict):
            raise ConfigError(f"tasks: {source!r}: task {number} is no object but {type(values).__name__}")
        task = Task(_name(values, number), values)
        if task.name in tasks:
            raise ConfigError(
                f"tasks: {source!r}: two tasks are called {task.name!r}; give each an `id` of its own"
            )
        tasks[task.name] = task
    if not tasks:
        raise ConfigError(f"tasks: {source!r} holds no task")
    return list(tasks.values())


def _name(values: Json, number: int) -> str:
    for key in NAMED_BY:
        word = values.get(key)
        if isinstance(word, str | int) and _PLAIN.fullmatch(str(word)):
            return str(word)
    return f"{number:06}-{digest_json(values)[:8]}"


def _values(source: str) -> Iterator[Json]:
    path = Path(source)
    if path.is_dir() and are_in(path):
        yield from harbor_tasks(path)
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".parquet", ".arrow"))
        if not files:
            raise ConfigError(f"tasks: {source!r} holds no file of JSON lines, Parquet or Arrow")
        for file in files:
            yield from _rows(file)
    elif path.is_file():
        yield from _rows(path)
    elif (few := _RANGE.fullmatch(source)) is not None:
        yield from ({"id": f"{number}", "idx": number} for number in range(int(few[1])))
    elif ":" in source:
        loaded = load_object(source, "tasks")
        values = loaded() if callable(loaded) else loaded
        if not isinstance(values, Iterable):
            raise ConfigError(f"tasks: {source!r} gives {type(values).__name__}; it must give objects")
        yield from values
    else:
        raise ConfigError(f"tasks: {source!r} is no file, no folder, no module:function and no range:N")


def _rows(file: Path) -> Iterator[Json]:
    try:
        if file.suffix == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        elif file.suffix == ".arrow":
            with pa.memory_map(str(file)) as opened:
                for batch in pa.ipc.open_stream(opened):
                    yield from batch.to_pylist()
        else:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _parsed(line, file, number)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"tasks: {file} cannot be read: {error}") from error


def _parsed(line: bytes, file: Path, number: int) -> Json:
    try:
        values: Json = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"tasks: {file}, line {number} is not JSON: {error}") from error
    return values


HARBOR = "harbor"
"""Value of such a task: its folder."""
WORKDIR = "/app"


def are_in(folder: Path) -> bool:
    """Whether a folder holds Harbor's tasks."""
    return any(folder.glob("*/task.toml"))


def harbor_tasks(folder: Path) -> Iterator[Json]:
    """The values of a folder's Harbor tasks, by name.

    `prompt` is the instruction, `image` and `workdir` are the container's.

    Raises:
        ConfigError: one cannot be read.
    """
    for file in sorted(folder.glob("*/task.toml")):
        task = file.parent
        try:
            settings = tomllib.loads(file.read_text())
            prompt = (task / "instruction.md").read_text()
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"tasks: {task} is no task of Harbor: {error}") from error
        if not (task / "tests" / "test.sh").exists():
            raise ConfigError(
                f"tasks: {task} has no tests/test.sh: tasks of several steps are not understood"
            )
        environment = settings.get("environment", {})
        workdirs = [words[1] for words in instructions(task / "environment") if words[0] == "WORKDIR"]
        yield {
            "id": task.name,
            "prompt": prompt,
            HARBOR: str(task.resolve()),
            "image": environment.get("docker_image"),
            "workdir": environment.get("workdir") or (workdirs[-1] if workdirs else WORKDIR),
            "metadata": settings.get("metadata", {}),
        }


def instructions(environment: Path) -> list[list[str]]:
    """The instructions of an environment's Dockerfile, as words, the first in capitals; none without a
    file."""
    file = environment / "Dockerfile"
    text = file.read_text().replace("\\\n", " ") if file.exists() else ""
    lines = [line.split() for line in text.splitlines()]
    return [[words[0].upper(), *words[1:]] for words in lines if words and not words[0].startswith("#")]
