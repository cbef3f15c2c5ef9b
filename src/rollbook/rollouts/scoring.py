"""Scores of ended rollouts: components and their weighted sum, each scored by a function, a program or
a judge (a service, or a model that is asked through a proxy).

Scoring by itself: launches that ended are scored again, and rewards that changed are superseded.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rollbook.rollouts.agents.agentic import LLM
from rollbook.rollouts.config import JudgeConfig, RolloutConfig, ScoreConfig
from rollbook.rollouts.launchers.agent_environment import Address, folder_of, passed, placed
from rollbook.rollouts.launchers.launching import Launch, Launcher
from rollbook.rollouts.outcome import Attempt
from rollbook.rollouts.places import read_course
from rollbook.rollouts.proxy import FAILURES, Http, Proxy, bearer
from rollbook.rollouts.tasks import Task
from rollbook.store.errors import ConfigError, RolloutError
from rollbook.store.events import VOID, Json
from rollbook.store.ids import new_id
from rollbook.store.load_object import call_maybe_async, load_object

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


class Scorers(contextlib.AbstractAsyncContextManager["Scorers"]):
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
        self._score = {component.name: self._scorer(component) for component in config.score}

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
        if not all(part.command for part in components):  # a program is given no more than the folder
            recorded = await self._proxy.trajectory(trajectory)
            attempt = replace(
                attempt, conversations=recorded["conversations"], trajectory_id=recorded["trajectory_id"]
            )

        async def one(component: ScoreConfig) -> float:
            async with asyncio.timeout(limit_s):
                number: float = await self._score[component.name](task, attempt)
                return number

        results = await asyncio.gather(*map(one, components), return_exceptions=True)
        return _summed(components, results, limit_s)

    def _scorer(self, component: ScoreConfig) -> Callable[[Task, Attempt], Any]:
        if component.function is not None:
            return _by_function(component.function)
        if component.url is not None:
            http = HttpJudge(component.name, component.url, component.token_variable)
            self._close.push_async_callback(http.close)
            return http.score
        if component.judge is not None:
            proxy = self._proxy
            if component.judge.proxy is not None:
                proxy = Proxy(component.judge.proxy, os.environ.get(component.judge.key_variable))
                self._close.push_async_callback(proxy.http.close)
            return ModelJudge(component.name, component.judge, proxy).score
        assert self._launcher is not None
        return _ByProgram(component, self._launcher, passed(self._config.agent, os.environ)).score


def _summed(components: Sequence[ScoreConfig], results: Sequence[Any], limit_s: float) -> Scores:
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    for component, result in zip(components, results, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, Exception):
                raise result
            late = isinstance(result, TimeoutError)
            why = f"it took longer than {limit_s:g} s" if late else f"{type(result).__name__}: {result}"
            errors[component.name] = why[:SHOWN]
        else:
            values[component.name] = result
    total = None if errors else math.fsum(config.weight * values[config.name] for config in components)
    return Scores(values, errors, total)


def _by_function(name: str) -> Callable[[Task, Attempt], Any]:
    function = load_object(name, "score.function")

    async def score(task: Task, attempt: Attempt) -> float:
        return number_of(await call_maybe_async(function, task, attempt), name)

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
        variables = {
            "ROLLBOOK_TASK_FILE": str(attempt.folder / "task.json"),
            "ROLLBOOK_TRAJECTORY_ID": attempt.trajectory,
            "ROLLBOOK_FOLDER": str(attempt.folder),
        }
        launch = Launch(
            launch_id=f"score-{uuid.uuid4()}",
            command=self._command,
            environment={**self._environment, **variables},
            folder=attempt.folder,
            output=folder,
        )
        running = await self._launcher.start(launch)
        try:
            ended = await running.wait()
        except BaseException:
            await running.stop(0)
            raise
        printed = (folder / "stdout.log").read_text(errors="replace").strip()
        if ended.code != 0:
            errors = (folder / "stderr.log").read_text(errors="replace")[-SHOWN:]
            how = f"signal {ended.signal}" if ended.code is None else f"exit code {ended.code}"
            raise RolloutError(f"{name} ended with {how}: {errors}")
        return read_number(printed, name)


PAUSE_S = 0.5
"""Before a request is sent again; twice as long before each further time."""
ANSWER_SHOWN = 300
_PASSING = frozenset({408, 409, 425, 429})
"""Answers that pass by themselves, beside those of 500 and more."""
_PLACE = re.compile(r"\{(\w+)\}")


class HttpJudge:
    """A service that is sent what an agent was to do and what it said.

    Raises:
        ConfigError: the variable that holds its token is not set.
    """

    def __init__(self, name: str, url: str, token_variable: str | None) -> None:
        self._name, self._url = name, url
        self._client = Http(bearer(token_variable, "score.token_variable"))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def score(self, task: Task, attempt: Attempt) -> float:
        """Its number; asked again for as long as it is away.

        Raises:
            RolloutError: it refuses, or answers no number.
        """
        body = {
            "task": task.values,
            "names": {"task": task.name, "trajectory": attempt.trajectory, "scorer": self._name},
            "trajectory_id": attempt.trajectory_id,
            "conversations": list(attempt.conversations),
        }
        key = {"idempotency-key": f"{attempt.trajectory_id}.{self._name}.{new_id()[-8:]}"}
        pause = PAUSE_S
        while True:
            try:
                answer = await self._client.send("POST", self._url, body, key)
            except FAILURES:
                pass
            else:
                if answer.status < 300:
                    return read_number(answer.text, self._url, whole=True)
                if answer.status < 500 and answer.status not in _PASSING:
                    text = answer.text[:ANSWER_SHOWN]
                    raise RolloutError(f"{self._url} answered {answer.status}: {text}")
            await asyncio.sleep(pause)
            pause *= 2


class ModelJudge:
    """A model that is asked; what it is asked and says is a trajectory of split `judge`.

    Args:
        proxy: that has the model.
    """

    def __init__(self, name: str, judge: JudgeConfig, proxy: Proxy) -> None:
        self._name, self._judge, self._proxy = name, judge, proxy

    async def score(self, task: Task, attempt: Attempt) -> float:
        """The number in its reply.

        Raises:
            RolloutError: the proxy or its engine is away, or there is no number in the reply.
        """
        own = f"{attempt.trajectory}.{self._name}.{new_id()[-8:]}"
        labels = {"scorer": self._name, "judges": attempt.trajectory}
        opened = await self._proxy.open_judge(own, attempt.trajectory_id, labels)
        status = VOID  # of what somebody stops, or the engine fails
        try:
            address = Address(self._proxy.url, own, opened.key)
            model = LLM(self._proxy.http, address.openai, address.key, own)
            reply = await model.chat(
                self._asked(task, attempt), **{"model": self._judge.model, **self._judge.options}
            )
            status = "failed"
            number = self._number(str(reply.get("content") or ""))
            status = "completed"
            return number
        finally:
            await self._proxy.finish(own, {"status": status})

    def _asked(self, task: Task, attempt: Attempt) -> list[Json]:
        values = {name: _text(value) for name, value in task.values.items()}
        values |= {"answer": attempt.answer, "conversation": _spoken(attempt.messages)}
        system = [] if self._judge.system is None else [{"role": "system", "content": self._judge.system}]
        return [*system, {"role": "user", "content": filled(self._judge.prompt, values)}]

    def _number(self, reply: str) -> float:
        if self._judge.parse is None:
            return read_number(reply, self._judge.model)
        numbers = re.findall(self._judge.parse, reply)
        if not numbers:
            text = f"{self._judge.model} said {reply[-ANSWER_SHOWN:]!r}, in which "
            text += f"{self._judge.parse!r} finds nothing"
            raise RolloutError(text)
        return read_number(numbers[-1], self._judge.model)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with each `{name}` replaced that has a value; a value is not read as a template."""
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), template)


def read_number(output: str, name: str, *, whole: bool = False) -> float:
    """The number on the last line of a text, alone or as `reward` of an object.

    Args:
        name: who said it.
        whole: all of it is that, whatever its lines.

    Raises:
        RolloutError: there is none.
    """
    lines = output.strip().splitlines()
    line = output if whole else lines[-1] if lines else ""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        where = "answered" if whole else "said, as its last line,"
        text = f"{name} {where} {line[:100]!r}: a number, or an object with `reward`, is wanted"
        raise RolloutError(text) from error
    return number_of(value["reward"] if isinstance(value, dict) and "reward" in value else value, name)


def number_of(value: Any, name: str) -> float:
    """What a scorer gave, as a number.

    Raises:
        RolloutError: it is none, or is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RolloutError(f"{name} gave {value!r}: a finite number is wanted")
    return float(value)


def _spoken(messages: Sequence[Json]) -> str:
    """A conversation as text."""
    return "\n\n".join(f"{message.get('role', '?')}:\n{_message_text(message)}" for message in messages)


def _message_text(message: Json) -> str:
    calls = message.get("tool_calls")
    parts = [_text(message.get("content") or "")] + ([orjson.dumps(calls).decode()] if calls else [])
    return "\n".join(part for part in parts if part)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


AGENT = "agent"
"""The source of a trajectory's own reward, which the weighted sum of scores is."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """What a scoring did.

    Attributes:
        scored: launches of which every component gave a number.
        failed: launches of which one did not; its earlier reward is still in force.
        rewards: that were written, since they are new or another number.
        left_out: why a launch could not be scored -> how many.
    """

    scored: int
    failed: int
    rewards: int
    left_out: Mapping[str, int]


async def assign(proxy: Proxy, trajectory: str, wanted: Mapping[str, float]) -> int:
    """Give a trajectory a reward of each source, in the place of the one in force; how many were written.

    Raises:
        RolloutError: the proxy does not answer, or refuses.
    """
    in_force = {
        reward["source"]: reward
        for reward in (await proxy.trajectory(trajectory))["rewards"]
        if reward["turn_id"] is None and not reward["superseded"]
    }
    changed = {
        source: value
        for source, value in wanted.items()
        if source not in in_force or in_force[source]["reward"] != value
    }
    for source, value in changed.items():
        earlier = in_force.get(source)
        await proxy.reward(trajectory, value, source, None if earlier is None else earlier["event_id"])
    return len(changed)


async def score_again(
    config: RolloutConfig,
    tasks: list[Task],
    proxy: Proxy,
    scorers: Scorers,
    say: Callable[[str], None] = lambda text: None,
) -> Rescored:
    """Score again every launch of the CONFIG's name that ended with a right to a reward, if its folder is
    there.

    Args:
        say: told of each component that failed.

    Raises:
        ConfigError: the CONFIG has no scorers.
        RolloutError: the proxy does not answer, or refuses.
    """
    if not config.score:
        raise ConfigError("the CONFIG has no [[score]]: there is nothing to score by")
    by_name = {task.name: task for task in tasks}
    places = asyncio.Semaphore(config.concurrency)
    tally: Counter[str] = Counter()

    async def rescore(name: str, task: str, folder: Path) -> None:
        async with places:
            if task not in by_name:
                tally["its task is not among the CONFIG's"] += 1
            elif not folder.is_dir():
                tally["its folder is gone"] += 1
            else:
                await again(name, by_name[task], folder)

    async def again(name: str, task: Task, folder: Path) -> None:
        scores = await scorers.score(task, name, folder)
        assert scores is not None
        for component, why in scores.errors.items():
            say(f"{name}: scorer {component} failed: {why}")
        whole = {} if scores.total is None else {AGENT: scores.total}
        written = await assign(proxy, name, {**scores.values, **whole})
        tally["rewards"] += written  # not in one with the wait, or what others add meanwhile is lost
        tally["failed" if scores.errors else "scored"] += 1

    async with scorers:
        await asyncio.gather(*(rescore(*launch) for launch in await _ended(config, proxy)))
    scored, failed, rewards = (tally.pop(what, 0) for what in ("scored", "failed", "rewards"))
    return Rescored(scored, failed, rewards, left_out=dict(tally))


async def _ended(config: RolloutConfig, proxy: Proxy) -> list[tuple[str, str, Path]]:
    """Trajectory, task and folder of each launch that ended with a right to a reward."""
    course = read_course(await proxy.course(config.name))
    launches = []
    for place, status in course.ended.items():
        if status.rewarded:
            name = place.trajectory(config.name, course.attempts[place])
            launches.append((name, place.task, folder_of(config.folder, name, course.launches[place])))
    return launches
