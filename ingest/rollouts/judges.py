"""Judges of what agents did: somebody's service, and a model that is asked through a proxy."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollbook.ingest.rollouts.agentic import LLM
from rollbook.ingest.rollouts.attempt import Attempt
from rollbook.ingest.rollouts.http import FAILURES, Http, bearer
from rollbook.ingest.rollouts.proxy import Proxy
from rollbook.ingest.rollouts.score_config import JudgeConfig
from rollbook.ingest.rollouts.tasks import Task
from rollbook.ingest.rollouts.told import Address
from rollbook.store.errors import RolloutError
from rollbook.store.events import VOID, Json
from rollbook.store.ids import new_id

PAUSE_S = 0.5
"""Before a request is sent again; twice as long before each further time."""
SHOWN = 300
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
                    said = answer.text[:SHOWN]
                    raise RolloutError(f"{self._url} answered {answer.status}: {said}")
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
            said = await model.chat(
                self._asked(task, attempt), **{"model": self._judge.model, **self._judge.options}
            )
            status = "failed"
            found = self._number(str(said.get("content") or ""))
            status = "completed"
            return found
        finally:
            await self._proxy.finish(own, {"status": status})

    def _asked(self, task: Task, attempt: Attempt) -> list[Json]:
        values = {name: _text(value) for name, value in task.values.items()}
        values |= {"answer": attempt.answer, "conversation": _spoken(attempt.messages)}
        system = [] if self._judge.system is None else [{"role": "system", "content": self._judge.system}]
        return [*system, {"role": "user", "content": filled(self._judge.prompt, values)}]

    def _number(self, said: str) -> float:
        if self._judge.parse is None:
            return read_number(said, self._judge.model)
        found = re.findall(self._judge.parse, said)
        if not found:
            text = f"{self._judge.model} said {said[-SHOWN:]!r}, in which {self._judge.parse!r} finds nothing"
            raise RolloutError(text)
        return read_number(found[-1], self._judge.model)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with its `{name}`s replaced, of which there are values. What values hold is no template."""
    return _PLACE.sub(lambda found: values.get(found[1], found[0]), template)


def read_number(said: str, name: str, *, whole: bool = False) -> float:
    """The number that a text ends with, on a line of its own, or has as `reward` of an object there.

    Args:
        name: who said it.
        whole: all of it is that, whatever its lines.

    Raises:
        RolloutError: it does not.
    """
    lines = said.strip().splitlines()
    line = said if whole else lines[-1] if lines else ""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        where = "answered" if whole else "said, as its last line,"
        text = f"{name} {where} {line[:100]!r}: a number, or an object with `reward`, is wanted"
        raise RolloutError(text) from error
    return number_of(found["reward"] if isinstance(found, dict) and "reward" in found else found, name)


def number_of(said: Any, name: str) -> float:
    """What somebody gave, as a number.

    Raises:
        RolloutError: it is none, or is not finite.
    """
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise RolloutError(f"{name} gave {said!r}: a finite number is wanted")
    return float(said)


def _spoken(messages: Sequence[Json]) -> str:
    """A conversation as text."""
    return "\n\n".join(f"{message.get('role', '?')}:\n{_said(message)}" for message in messages)


def _said(message: Json) -> str:
    calls = message.get("tool_calls")
    parts = [_text(message.get("content") or "")] + ([orjson.dumps(calls).decode()] if calls else [])
    return "\n".join(part for part in parts if part)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
