"""Scores of ended rollouts: components, each by a function, a program or a judge, and their weighted sum."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollbook.ingest.rollouts.attempt import Attempt
from rollbook.ingest.rollouts.config import RolloutConfig
from rollbook.ingest.rollouts.judges import HttpJudge, ModelJudge, number_of, read_number
from rollbook.ingest.rollouts.launching import Launch, Launcher
from rollbook.ingest.rollouts.named import called, imported
from rollbook.ingest.rollouts.proxy import Proxy
from rollbook.ingest.rollouts.score_config import ScoreConfig
from rollbook.ingest.rollouts.tasks import Task
from rollbook.ingest.rollouts.told import passed, placed
from rollbook.store.errors import RolloutError
from rollbook.store.events import Json

SHOWN = 2000
"""Characters of a scorer's error that are kept."""


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


class Scorers:
    """The scorers of a CONFIG. As a context manager it closes its connections.

    Args:
        proxy: of the agents.
        launcher: of programs.

    Raises:
        ConfigError: it names a function, and there is none such, or a variable that is not set.
    """

    def __init__(self, config: RolloutConfig, proxy: Proxy, launcher: Launcher | None) -> None:
        self._config, self._proxy, self._launcher = config, proxy, launcher
        self._close = contextlib.AsyncExitStack()
        self._score = {one.name: self._scorer(one) for one in config.score}

    async def __aenter__(self) -> Scorers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close.aclose()

    async def score(self, task: Task, trajectory: str, folder: Path) -> Scores | None:
        """Have every component scored, side by side; None: there are none.

        Raises:
            RolloutError: the agents' proxy does not say what the agent said.
        """
        components, limit_s = self._config.score, self._config.clocks.scoring_s
        if not components:
            return None
        attempt = Attempt(trajectory, folder)
        if not all(one.command for one in components):  # a program is given no more than the folder
            said = await self._proxy.trajectory(trajectory)
            attempt = replace(
                attempt, conversations=said["conversations"], trajectory_id=said["trajectory_id"]
            )

        async def one(component: ScoreConfig) -> float:
            async with asyncio.timeout(limit_s):
                number: float = await self._score[component.name](task, attempt)
                return number

        found = await asyncio.gather(*map(one, components), return_exceptions=True)
        return _summed(components, found, limit_s)

    def _scorer(self, one: ScoreConfig) -> Callable[[Task, Attempt], Any]:
        if one.function is not None:
            return _by_function(one.function)
        if one.url is not None:
            http = HttpJudge(one.name, one.url, one.token_variable)
            self._close.push_async_callback(http.close)
            return http.score
        if one.judge is not None:
            proxy = self._proxy
            if one.judge.proxy is not None:
                proxy = Proxy(one.judge.proxy, os.environ.get(one.judge.key_variable))
                self._close.push_async_callback(proxy.http.close)
            return ModelJudge(one.name, one.judge, proxy).score
        assert self._launcher is not None
        return _ByProgram(one, self._launcher, passed(self._config.agent, os.environ)).score


def _summed(components: Sequence[ScoreConfig], found: Sequence[Any], limit_s: float) -> Scores:
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    for component, said in zip(components, found, strict=True):
        if isinstance(said, BaseException):
            if not isinstance(said, Exception):
                raise said
            late = isinstance(said, TimeoutError)
            why = f"it took longer than {limit_s:g} s" if late else f"{type(said).__name__}: {said}"
            errors[component.name] = why[:SHOWN]
        else:
            values[component.name] = said
    total = None if errors else math.fsum(one.weight * values[one.name] for one in components)
    return Scores(values, errors, total)


def _by_function(name: str) -> Callable[[Task, Attempt], Any]:
    function = imported(name, "score.function")

    async def score(task: Task, attempt: Attempt) -> float:
        return number_of(await called(function, task, attempt), name)

    return score


class _ByProgram:
    """A program in the agent's folder."""

    def __init__(self, component: ScoreConfig, launcher: Launcher, environment: Mapping[str, str]) -> None:
        self._component, self._launcher, self._environment = component, launcher, environment
        self._command = placed(component.command)

    async def score(self, task: Task, attempt: Attempt) -> float:
        """What its last line says."""
        name = self._component.command[0]
        folder = attempt.folder / f"score-{self._component.name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        told = {
            "ROLLBOOK_TASK_FILE": str(attempt.folder / "task.json"),
            "ROLLBOOK_TRAJECTORY_ID": attempt.trajectory,
            "ROLLBOOK_FOLDER": str(attempt.folder),
        }
        launch = Launch(
            launch_id=f"score-{uuid.uuid4()}",
            command=self._command,
            environment={**self._environment, **told},
            folder=attempt.folder,
            output=folder,
        )
        running = await self._launcher.start(launch)
        try:
            ended = await running.wait()
        except BaseException:
            await running.stop(0)
            raise
        said = (folder / "stdout.log").read_text(errors="replace").strip()
        if ended.code != 0:
            errors = (folder / "stderr.log").read_text(errors="replace")[-SHOWN:]
            how = f"signal {ended.signal}" if ended.code is None else f"exit code {ended.code}"
            raise RolloutError(f"{name} ended with {how}: {errors}")
        return read_number(said, name)
