"""Scores of ended rollouts: components, each by a function or a program, and their weighted sum."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollbook.ingest.rollouts.config import ScoreConfig
from rollbook.ingest.rollouts.launching import Launch, Launcher
from rollbook.ingest.rollouts.named import called, imported
from rollbook.ingest.rollouts.tasks import Task
from rollbook.ingest.rollouts.told import placed
from rollbook.store.errors import RolloutError
from rollbook.store.events import Json

SHOWN = 2000
"""Characters of a scorer's error that are kept."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What scorers are given beside the task.

    Attributes:
        trajectory: its name.
        folder: what the agent left there.
    """

    trajectory: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Scores:
    """What scorers said.

    Attributes:
        values: component -> number.
        errors: component -> why it has none. Then there is no sum: a scorer that fails is no reward of 0.
        total: the weighted sum; None without a component, or with one that failed.
    """

    values: Mapping[str, float]
    errors: Mapping[str, str]
    total: float | None

    @property
    def described(self) -> Json:
        """As the log has it."""
        return {**self.values, **{name: {"error": why} for name, why in self.errors.items()}}


def functions_of(components: Sequence[ScoreConfig]) -> dict[str, Callable[..., Any]]:
    """Component -> its function, of those that have one.

    Raises:
        ConfigError: there is no such function.
    """
    return {one.name: imported(one.function, "score.function") for one in components if one.function}


async def score(
    components: Sequence[ScoreConfig],
    functions: Mapping[str, Callable[..., Any]],
    task: Task,
    attempt: Attempt,
    timeout_s: float,
    launcher: Launcher | None,
    environment: Mapping[str, str],
) -> Scores:
    """Have every component scored, side by side.

    Args:
        functions: as `functions_of` gives them.
        launcher: of programs.
        environment: of programs.
    """

    async def one(component: ScoreConfig) -> float:
        async with asyncio.timeout(timeout_s):
            if component.function is not None:
                said = await called(functions[component.name], task, attempt)
                return _number(said, component.function)
            assert launcher is not None
            return await _by_program(component, attempt, launcher, environment)

    found = await asyncio.gather(*map(one, components), return_exceptions=True)
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    for component, said in zip(components, found, strict=True):
        if isinstance(said, BaseException):
            if not isinstance(said, Exception):
                raise said
            late = isinstance(said, TimeoutError)
            why = f"it took longer than {timeout_s:g} s" if late else f"{type(said).__name__}: {said}"
            errors[component.name] = why[:SHOWN]
        else:
            values[component.name] = said
    whole = bool(values) and not errors
    total = math.fsum(one.weight * values[one.name] for one in components) if whole else None
    return Scores(values, errors, total)


async def _by_program(
    component: ScoreConfig, attempt: Attempt, launcher: Launcher, environment: Mapping[str, str]
) -> float:
    folder = attempt.folder / f"score-{component.name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    launch = Launch(
        launch_id=f"score-{uuid.uuid4()}",
        command=placed(component.command),
        environment=dict(environment) | {"ROLLBOOK_FOLDER": str(attempt.folder)},
        folder=attempt.folder,
        output=folder,
    )
    running = await launcher.start(launch)
    try:
        ended = await running.wait()
    except BaseException:
        await running.stop(0)
        raise
    said = (folder / "stdout.log").read_text(errors="replace").strip()
    if ended.code != 0:
        errors = (folder / "stderr.log").read_text(errors="replace")[-SHOWN:]
        how = f"signal {ended.signal}" if ended.code is None else f"exit code {ended.code}"
        raise RolloutError(f"{component.command[0]} ended with {how}: {errors}")
    return _read(said.splitlines()[-1] if said else "", component.command[0])


def _read(line: str, name: str) -> float:
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        text = (
            f"{name} printed {line[:100]!r} as its last line: a number, or an object with `reward`, is wanted"
        )
        raise RolloutError(text) from error
    return _number(said["reward"] if isinstance(said, dict) and "reward" in said else said, name)


def _number(said: Any, name: str) -> float:
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise RolloutError(f"{name} gave {said!r}: a finite number is wanted")
    return float(said)
