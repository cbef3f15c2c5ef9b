"""Honest agents: a separate process that talks as agents do, and keeps every acknowledgement.

Each agent works on one trajectory at a time: a few turns by one of the APIs, streamed or not,
some with siblings, a reward, a finish. Failed requests are repeated. Every acknowledgement is a
line of a file, and is looked up in the log at the end. Commands come on stdin, a JSON object a
line: `begin` a lap, `end` it (the latencies of the requests begun in it, once all of those have
ended), `stop`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

from rollbook.bench.hostile.script import reply_to
from rollbook.bench.http_client import Connection, Reply
from rollbook.bench.tied import end_with_parent
from rollbook.edge.server_sent_events import messages_of

REQUEST_S, RETRY_S = 30.0, 0.05
BROKEN = 0
"""The status of a request that got no whole answer."""
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
ENDS = {CHAT: b"data: [DONE]", RESPONSES: b"response.completed", MESSAGES: b"message_stop"}
"""What ends a stream, and acknowledges it."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How the agents behave.

    Attributes:
        acks: the file that keeps the acknowledgements.
        name: prefix of the names of their trajectories.
        writer, judge: the keys of agents and of those who reward them; an empty one is not sent.
        apis: which endpoints are used.
        pause_s: mean time between two requests of an agent.
    """

    url: str
    acks: str
    name: str
    writer: str = ""
    judge: str = ""
    apis: tuple[str, ...] = (CHAT, RESPONSES, MESSAGES)
    agents: int = 12
    pause_s: float = 0.06
    turns: int = 3
    seed: int = 0


@dataclass(slots=True)
class RequestResult:
    """One request: when it was begun, seconds until its end, the status of its answer."""

    begun: float
    took: float
    status: int
    what: str


class Headed(Connection):
    """A connection that keeps the headers of its last reply, by their lower-case names."""

    def on_message_begin(self) -> None:
        """A response comes."""
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


@dataclass(slots=True)
class Lap:
    """The requests made in a lap, and those under way."""

    begun: float = 0.0
    asked: list[RequestResult] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)


class Agents:
    """The pool."""

    def __init__(self, habits: Habits) -> None:
        self.habits, self.lap, self.stopping = habits, Lap(), False
        self.acks = os.open(habits.acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.wrong: list[str] = []
        """Replies that are not what the engine says to their question."""
        self._lock = threading.Lock()

    async def work(self) -> None:
        """Work until told to stop."""
        await asyncio.gather(*(self._agent(number) for number in range(self.habits.agents)))

    async def _agent(self, number: int) -> None:
        rng = random.Random(f"{self.habits.seed} {number}")
        count = 0
        async with Headed(self.habits.url, REQUEST_S) as connection:
            while not self.stopping:
                name = f"{self.habits.name}-{self.habits.seed}-{number}-{count}"
                await self._trajectory(connection, name, rng)
                count += 1

    async def _trajectory(self, connection: Headed, name: str, rng: random.Random) -> None:
        api, stream = rng.choice(self.habits.apis), rng.random() < 0.4
        siblings = 2 if api == CHAT and not stream and rng.random() < 0.2 else 1
        messages: list[dict[str, str]] = []
        replies = 0
        for turn in range(rng.randint(1, self.habits.turns)):
            question = f"question {turn} of {name}, {rng.random()}"
            messages.append({"role": "user", "content": question})
            mark = f"mark-{rng.getrandbits(64):x}"
            body = _body(api, messages, mark, stream, siblings)
            answer = await self._ask(connection, f"/t/{name}/v1/{api}", body, self.habits.writer, rng)
            if answer is None or self.stopping:
                return
            text = reply_to(question)
            if stream and ENDS[api] not in answer.body:
                return  # it was cut off, and says so: nothing was acknowledged
            if said(api, answer.body, stream) != [text] * siblings:
                self.wrong.append(f"{name}: {answer.body[:300]!r}, not {text!r}")
                return
            turn_ids = [part for part in connection.headers.get("x-rollbook-turn-id", "").split(",") if part]
            if len(turn_ids) != siblings:
                self.wrong.append(f"{name}: {siblings} replies, and the turns {turn_ids}")
                return
            for turn_id in turn_ids:
                self._ack("turn", turn_id=turn_id, trajectory=name, question=question, text=text, mark=mark)
                replies += 1
            messages.append({"role": "assistant", "content": text})
        await self._end(connection, name, rng, replies)

    async def _end(self, connection: Headed, name: str, rng: random.Random, turns: int) -> None:
        reward = round(rng.random(), 4)
        path, source = f"/v1/trajectories/{name}", "checker"
        if rng.random() < 0.3:
            body = {"reward": reward / 2, "source": source}
            answer = await self._ask(connection, f"{path}/rewards", body, self.habits.judge, rng)
            if answer is not None:
                event_id = orjson.loads(answer.body)["event_id"]
                self._ack("reward", event_id=event_id, trajectory=name, reward=reward / 2, source=source)
        answer = await self._ask(connection, f"{path}/finish", {"reward": reward}, self.habits.writer, rng)
        if answer is not None:
            self._ack("finish", trajectory=name, reward=reward, turns=turns)

    def _ack(self, what: str, **said: Any) -> None:
        os.write(self.acks, orjson.dumps({"what": what, **said}) + b"\n")

    async def _ask(
        self, connection: Headed, path: str, body: dict[str, Any], key: str, rng: random.Random
    ) -> Reply | None:
        """The answer with status 200, repeating the request as needed; None if none can come any more."""
        headers = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        tries = 0
        while not self.stopping:
            await asyncio.sleep(rng.expovariate(1 / self.habits.pause_s))
            tries += 1
            reply = await self._timed(connection, path, orjson.dumps(body), headers)
            if reply is not None and reply.status in (200, 201):
                return reply
            if reply is not None and path.endswith("/finish") and tries > 1 and reply.status == 409:
                return None  # the first one's answer was lost
            await asyncio.sleep(RETRY_S)
        return None

    async def _timed(self, connection: Headed, path: str, body: bytes, headers: bytes) -> Reply | None:
        begun = time.perf_counter()
        me = id(connection)
        self.lap.running[me] = begun
        status, what = BROKEN, ""
        try:
            reply = await connection.post(path, [body], headers)
            status = reply.status
            what = "" if status < 300 else f"{path}: {status} {reply.body[:200]!r}"
            return reply
        except (OSError, TimeoutError) as error:
            what = f"{path}: {error!r}"
            connection.close()
            return None
        finally:
            del self.lap.running[me]
            self.lap.asked.append(RequestResult(begun, time.perf_counter() - begun, status, what))

    # Called from the thread that obeys; a list and a dict are enough to meet in -----------------

    def begin(self) -> None:
        """From now on requests count as this lap's."""
        self.lap.asked.clear()
        self.lap.begun = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """The results of a lap, once all requests begun in it have ended."""
        over, lap = time.perf_counter(), self.lap
        deadline = over + REQUEST_S + 1
        while any(begun < over for begun in list(lap.running.values())) and time.perf_counter() < deadline:
            time.sleep(0.005)
        requests = [request for request in list(lap.asked) if lap.begun <= request.begun < over]
        good = [request for request in requests if request.status in (200, 201)]
        messages = [request.what for request in requests if request.what]
        return {
            "ms": [1e3 * request.took for request in good],
            "refused": len(requests) - len(good),
            "errors_500": sum(request.status == 500 for request in requests),
            "told": messages[:5],
            "wrong": self.wrong[:5],
        }


def said(api: str, body: bytes, stream: bool) -> list[str]:
    """The text of each choice of a reply.

    Bytes that are no stream of a reply have none.
    """
    try:
        if not stream:
            return _whole(api, orjson.loads(body))
        events = [message.data for message in messages_of(body) if message.data.startswith(b"{")]
        return ["".join(_delta(api, orjson.loads(event)) for event in events)]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def _whole(api: str, reply: dict[str, Any]) -> list[str]:
    if api == CHAT:
        return [choice["message"]["content"] for choice in reply["choices"]]
    if api == MESSAGES:
        return ["".join(block["text"] for block in reply["content"])]
    return ["".join(part["text"] for item in reply["output"] for part in item["content"])]


def _delta(api: str, event: dict[str, Any]) -> str:
    if api == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if api == MESSAGES:
        delta = event["delta"]["text"] if event["type"] == "content_block_delta" else ""
    else:
        delta = event["delta"] if event["type"] == "response.output_text.delta" else ""
    return str(delta)


def _body(api: str, messages: list[dict[str, str]], mark: str, stream: bool, n: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "temperature": 0.5} | ({"stream": True} if stream else {})
    if api == CHAT:
        return body | {"messages": messages, "user": mark} | ({"n": n} if n > 1 else {})
    if api == RESPONSES:
        return body | {"input": messages, "metadata": {"mark": mark}}
    return body | {"messages": messages, "metadata": {"user_id": mark}, "max_tokens": 64}


def main() -> None:
    """Execute commands until stdin ends."""
    end_with_parent()
    settings = orjson.loads(sys.argv[1])
    agents = Agents(Habits(**settings | {"apis": tuple(settings["apis"])}))
    thread = threading.Thread(target=lambda: uvloop.run(agents.work()), daemon=True)
    thread.start()
    for line in sys.stdin.buffer:
        command = orjson.loads(line)["do"]
        answer: dict[str, Any] = {}
        if command == "begin":
            agents.begin()
        elif command == "end":
            answer = agents.end()
        else:
            agents.stopping = True
            thread.join(REQUEST_S + 5)
            answer = {"wrong": agents.wrong}
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
