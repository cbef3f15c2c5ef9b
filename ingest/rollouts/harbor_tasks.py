"""Tasks in folders as Harbor has them: `task.toml`, `instruction.md`, `environment/` and `tests/test.sh`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from rollbook.store.errors import ConfigError
from rollbook.store.events import Json

HARBOR = "harbor"
"""Value of such a task: its folder."""
WORKDIR = "/app"


def are_in(folder: Path) -> bool:
    """Whether a folder holds such tasks."""
    return any(folder.glob("*/task.toml"))


def harbor_tasks(folder: Path) -> Iterator[Json]:
    """Their values, by name: `prompt` is the instruction, `image` and `workdir` are the container's.

    Raises:
        ConfigError: one cannot be read.
    """
    for file in sorted(folder.glob("*/task.toml")):
        task = file.parent
        try:
            said = tomllib.loads(file.read_text())
            prompt = (task / "instruction.md").read_text()
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"tasks: {task} is no task of Harbor: {error}") from error
        if not (task / "tests" / "test.sh").exists():
            raise ConfigError(
                f"tasks: {task} has no tests/test.sh: tasks of several steps are not understood"
            )
        environment = said.get("environment", {})
        workdirs = [words[1] for words in instructions(task / "environment") if words[0] == "WORKDIR"]
        yield {
            "id": task.name,
            "prompt": prompt,
            HARBOR: str(task.resolve()),
            "image": environment.get("docker_image"),
            "workdir": environment.get("workdir") or (workdirs[-1] if workdirs else WORKDIR),
            "metadata": said.get("metadata", {}),
        }


def instructions(environment: Path) -> list[list[str]]:
    """The lines of its Dockerfile, in words, the first in capitals; none where there is none."""
    file = environment / "Dockerfile"
    text = file.read_text().replace("\\\n", " ") if file.exists() else ""
    lines = [line.split() for line in text.splitlines()]
    return [[words[0].upper(), *words[1:]] for words in lines if words and not words[0].startswith("#")]
