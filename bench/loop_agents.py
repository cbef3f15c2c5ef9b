"""The agents of the online loop: a fixed number of them, whose time between turns has a long tail.

They are ordinary clients: a failed request is sent again, in the same trajectory, either marked
as a retry (with `x-stainless-retry-count`, as OpenAI's library does) or as a new request. They
keep every answer.

Commands on stdin, a JSON object a line: `begin` (optionally only so many `groups`); `end` (open
no further group and finish those that are open: `over` says whether that is done after
`within_s`); `count` (how many replies came so far); `report` (every one of them).
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop

from rollbook.bench.http_client import Connection, Reply
from rollbook.bench.tied import end_with_parent

RETRY_S = 0.1
REQUEST_S = 60.0
AGAIN = (408, 429, 499, 500, 502, 503, 504)
"""Answers upon which a client tries again."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How the agents behave.

    Attributes:
        url: of the proxy; several of one run have spaces between them: any is asked, and the next one where
            one does not answer.
        request_s: longest wait for an answer.
        agents: how many; each works on one trajectory at a time.
        group_size: trajectories of a group, begun one after the other.
        turns: fewest and most turns of a trajectory.
        pause_s, sigma, longest_s: between turns, log-normal: median, sigma of the logarithm, bound.
    """

    url: str
    seed: int = 0
    agents: int = 16
    group_size: int = 4
    turns: tuple[int, int] = (1, 4)
    pause_s: float = 0.1
    sigma: float = 1.2
    longest_s: float = 3.0
    request_s: float = REQUEST_S

    def pause(self, rng: random.Random) -> float:
        """Seconds that a tool, or whatever an agent does between two turns, takes."""
        return min(self.pause_s * math.exp(rng.gauss(0.0, self.sigma)), self.longest_s)


@dataclass(slots=True)
class Way:
    """To one of the proxies, and to the next one where that does not answer."""

    urls: Sequence[str]
    at: int
    timeout_s: float
    _connection: Connection | None = None

    async def post(self, path: str, body: bytes, headers: bytes) -> Reply | None:
        """The answer; None where none came."""
        if self._connection is None:
            self._connection = Connection(self.urls[self.at % len(self.urls)], self.timeout_s)
        try:
            return await self._connection.post(path, [body], headers)
        except (OSError, TimeoutError):
            self.close()
            self.at += 1
            return None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(slots=True)
class Agents:
    """The pool, and what became of its trajectories.

    Attributes:
        answered: (trajectory's name, turn's id, text) of every reply that came whole.
        finished: names of the trajectories that were finished.
        answered_s, finished_s: when each of them was, in seconds since 1970.
        strange: answers that no client expects.
    """

    habits: Habits
    answered: list[tuple[str, str, str]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    repeats: int = 0
    groups: int = 0
    ending: bool = False

    async def work(self, groups: int | None = None) -> None:
        """Work until told to end, or on so many groups."""
        jobs = self._jobs(math.inf if groups is None else self.groups + groups)
        await asyncio.gather(*(self._agent(number, jobs) for number in range(self.habits.agents)))

    def _jobs(self, end: float) -> Iterator[tuple[str, str]]:
        """Trajectories, group by group; a group that was begun is given out whole."""
        while not self.ending and self.groups < end:
            group = self.groups
            self.groups += 1
            for member in range(self.habits.group_size):
                yield f"g{group}", f"g{group}-{member}"

    async def _agent(self, number: int, jobs: Iterator[tuple[str, str]]) -> None:
        way = Way(self.habits.url.split(), number, self.habits.request_s)
        for group, name in jobs:
            await self._trajectory(way, group, name)
        way.close()

    async def _trajectory(self, way: Way, group: str, name: str) -> None:
        # By its name alone: whoever takes it, it goes the same way.
        rng = random.Random(f"{self.habits.seed} {name}")
        path = f"/t/{name}/group/{group}/v1/chat/completions"
        messages = [{"role": "user", "content": f"what is {group}, asked by {name}?"}]
        for turn in range(rng.randint(*self.habits.turns)):
            if turn:
                messages.append({"role": "user", "content": f"and then {turn}?"})
            body = {"model": "m", "messages": messages, "max_tokens": 32, "temperature": 1.0}
            answer = await self._ask(way, path, orjson.dumps(body), rng)
            if answer is None:
                return
            message = answer["choices"][0]["message"]
            self.answered.append((name, answer["id"].removeprefix("chatcmpl-"), message["content"] or ""))
            self.answered_s.append(time.time())
            messages = [*messages, {"role": "assistant", "content": message["content"]}]
            await asyncio.sleep(self.habits.pause(rng))
        finish = orjson.dumps({"reward": round(rng.random(), 3)})
        if await self._ask(way, f"/v1/trajectories/{name}/finish", finish, rng) is not None:
            self.finished.append(name)
            self.finished_s.append(time.time())

    async def _ask(self, way: Way, path: str, body: bytes, rng: random.Random) -> Any:
        """The answer, repeating the request as needed; None if it is one that no client expects."""
        tries = 0
        while True:
            headers = b"x-stainless-retry-count: %d\r\n" % tries if tries and rng.random() < 0.5 else b""
            reply = await way.post(path, body, headers)
            if reply is not None and reply.status == 200:
                return orjson.loads(reply.body)
            if reply is not None:
                code = _code(reply.body)
                if path.endswith("/finish") and code == "trajectory_finished" and tries:
                    return {}  # the answer to the first time was lost
                if reply.status not in AGAIN and code != "trajectory_busy":
                    self.strange.append(f"{path}: {reply.status} {reply.body[:200]!r}")
                    return None
            tries += 1
            self.repeats += 1
            await asyncio.sleep(RETRY_S)

    def report(self) -> dict[str, Any]:
        """What they saw."""
        return {
            "answered": self.answered,
            "finished": self.finished,
            "answered_s": self.answered_s,
            "finished_s": self.finished_s,
            "strange": self.strange,
            "repeats": self.repeats,
        }


def _code(body: bytes) -> Any:
    try:
        return orjson.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _work(agents: Agents, groups: int | None) -> None:
    uvloop.run(agents.work(groups))


def main() -> None:
    """Execute commands until stdin ends."""
    end_with_parent()
    settings = orjson.loads(Path(sys.argv[1]).read_bytes())
    agents = Agents(Habits(**settings | {"turns": tuple(settings["turns"])}))
    working: threading.Thread | None = None
    for line in sys.stdin.buffer:
        command = orjson.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "begin":
            agents.ending = False
            working = threading.Thread(target=_work, args=(agents, command.get("groups")), daemon=True)
            working.start()
        elif command["do"] == "end":
            agents.ending = True
            if working is not None:
                working.join(command["within_s"])
            answer = {"over": working is None or not working.is_alive()}
        elif command["do"] == "count":
            answer = {"replies": len(agents.answered), "strange": agents.strange[:3]}
        else:
            answer = agents.report()
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
