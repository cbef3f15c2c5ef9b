"""The load generator: a separate process that talks as agents do, and checks every reply.

It reads commands from stdin, a JSON object a line, and answers each with one on stdout. Only
checked replies count; the number of wrong ones is in `wrong`, with the first reasons.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop

from rollbook.bench.figure import quantile
from rollbook.bench.http_client import Connection
from rollbook.bench.http_client import Reply as Response
from rollbook.bench.processes import obey
from rollbook.bench.scripted.dialogues import Material, Reply, marked
from rollbook.bench.tied import end_with_parent
from rollbook.edge.server_sent_events import events_of

ECHO = "echo"
"""The kind of server that sends bodies back; others answer as OpenAI does."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1024}


@dataclass(slots=True)
class Tally:
    """The outcome of some turns."""

    turns: int = 0
    whole_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, response: Response) -> None:
        """Count a turn that was answered correctly."""
        self.turns += 1
        self.whole_ms.append(1e3 * response.whole_s)
        self.first_ms.append(1e3 * response.first_s)

    def fail(self, reason: str) -> None:
        """Count a turn that was not."""
        self.wrong += 1
        if len(self.reasons) < 3:
            self.reasons.append(reason[:500])

    def as_json(self) -> dict[str, Any]:
        """Counts and latencies."""
        whole, first = ({f"p{q}": quantile(ms, q) for q in (50, 99)} for ms in (self.whole_ms, self.first_ms))
        counts = {"turns": self.turns, "wrong": self.wrong, "reasons": self.reasons}
        return counts | {"whole_ms": whole, "first_ms": first}


_COUNT = itertools.count()


class WrongReply(Exception):
    """A reply that differs from the engine's."""


@dataclass(slots=True)
class Conversation:
    """One trajectory's client side: its history, and the expected next replies."""

    material: Material
    seed: int
    turns: int
    kind: str
    stream: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = self.material.opening(self.seed)

    def ask(self, turn: int) -> bytes:
        """The body of a turn's request."""
        return orjson.dumps(self.fields(turn))

    def fields(self, turn: int) -> dict[str, Any]:
        """A turn's request, its last message marked with the reply that is wanted."""
        number = self.material.reply_number(self.seed, turn, last=turn == self.turns - 1)
        if turn:
            call_id = self.messages[-1]["tool_calls"][0]["id"]
            # What tools say is never the same twice, as caches of whole texts would like it.
            result = f"{self.material.result(self.seed, turn)}\n({next(_COUNT)})"
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        last = self.messages[-1]
        last["content"] = marked(last["content"], number)
        body = SAMPLING | {"model": "bench", "messages": self.messages, "tools": self.material.tools}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def hear(self, turn: int, response: Response) -> None:
        """Check the reply and continue from it.

        Raises:
            WrongReply: it is not the expected one.
        """
        if response.status != 200:
            raise WrongReply(f"status {response.status}: {response.body[:300]!r}")
        if self.kind == ECHO:
            self.messages.append(self._echoed(self._wanted(turn), response))
        elif self.stream:
            self.take(turn, streamed(response.body))
        else:
            self.take(turn, orjson.loads(response.body)["choices"][0])

    def take(self, turn: int, choice: Mapping[str, Any]) -> None:
        """As `hear`, for a choice of a reply."""
        wanted = self._wanted(turn)
        message, finish = choice["message"], choice["finish_reason"]
        call = wanted.name is not None
        if (message.get("content") or "").strip() != wanted.content.strip():
            raise WrongReply(f"turn {turn}: {message.get('content')!r}, not {wanted.content!r}")
        if finish != ("tool_calls" if call else "stop"):
            raise WrongReply(f"turn {turn}: finish_reason {finish!r}")
        if call:
            [tool_call] = message["tool_calls"]
            function = tool_call["function"]
            if (function["name"], orjson.loads(function["arguments"])) != (wanted.name, wanted.arguments):
                raise WrongReply(f"turn {turn}: call {function}, not {wanted}")
        self.messages.append({k: v for k, v in message.items() if k in ("role", "content", "tool_calls")})

    def _wanted(self, turn: int) -> Reply:
        return self.material.replies[self.material.reply_number(self.seed, turn, last=turn == self.turns - 1)]

    def _echoed(self, wanted: Reply, response: Response) -> dict[str, Any]:
        """A stand-in of the same size for the reply, after a look at what came back."""
        if orjson.loads(response.body)["messages"] != self.messages:
            raise WrongReply("the echo is not what was sent")
        message: dict[str, Any] = {"role": "assistant", "content": wanted.content}
        if wanted.name is not None:
            arguments = orjson.dumps(wanted.arguments).decode()
            function = {"name": wanted.name, "arguments": arguments}
            call_id = "call-00000000-0000-7000-8000-000000000000-0"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        return message


def streamed(body: bytes) -> dict[str, Any]:
    """The choice that a stream of chunks adds up to.

    Raises:
        WrongReply: it does not end as a stream does.
    """
    if not body.rstrip().endswith(b"data: [DONE]"):
        raise WrongReply(f"a stream ended without its mark: {body[-300:]!r}")
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    finish = None
    for chunk in events_of(body):
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            content.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                whole = calls.setdefault(call["index"], {"type": "function", "function": {"arguments": ""}})
                whole["id"] = call.get("id") or whole.get("id")
                function = call.get("function") or {}
                whole["function"]["name"] = function.get("name") or whole["function"].get("name")
                whole["function"]["arguments"] += function.get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"message": message, "finish_reason": finish}


# Commands ---------------------------------------------------------------------------------------


async def turns(material: Material, command: dict[str, Any]) -> dict[str, Any]:
    """`trajectories` conversations of `turns` turns, `concurrency` at a time.

    Each has its own connection; with `shared` every turn takes one from a common pool. Requests
    that finish trajectories are sent after the clock has stopped.
    """
    tally, done = Tally(), []
    seeds = iter(range(command["seed"], command["seed"] + command["trajectories"]))
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    size = command["concurrency"]

    async def worker(own: Connection | None) -> None:
        for seed in seeds:
            name = f"{command['name']}-{seed}"
            conversation = Conversation(
                material, seed, command["turns"], command["kind"], command.get("stream", False)
            )
            if await _converse(own or idle, conversation, command["path"].replace("NAME", name), tally):
                done.append(name)

    async with AsyncExitStack() as stack:
        # A fifth fewer than agents: then a turn takes whichever is free, and not always the same one.
        opened = [await stack.enter_async_context(Connection(command["url"])) for _ in range(size)]
        shared = bool(command.get("shared"))
        for connection in opened[: max(size * 4 // 5, 1)] if shared else ():
            idle.put_nowait(connection)
        begun, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(worker(None if shared else connection) for connection in opened))
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if command.get("finish"):
        await _finish(command["url"], done, tally)
    return tally.as_json() | {"wall_s": wall, "cpu_s": cpu}


async def _converse(
    connections: Connection | asyncio.Queue[Connection], conversation: Conversation, path: str, tally: Tally
) -> bool:
    for turn in range(conversation.turns):
        try:
            connection = connections if isinstance(connections, Connection) else await connections.get()
            try:
                response = await connection.post(path, [conversation.ask(turn)])
            finally:
                if isinstance(connections, asyncio.Queue):
                    connections.put_nowait(connection)
            conversation.hear(turn, response)
        except (OSError, TimeoutError, WrongReply, KeyError, ValueError) as error:
            tally.fail(repr(error))
            return False
        tally.add(response)
    return True


async def _finish(url: str, names: Iterable[str], tally: Tally) -> None:
    async with Connection(url) as connection:
        for name in names:
            body = orjson.dumps({"reward": 1.0, "success": True})
            response = await connection.post(f"/v1/trajectories/{name}/finish", [body])
            if response.status != 200:
                tally.fail(f"finish: {response.status} {response.body!r}")


async def pairs(material: Material, command: dict[str, Any]) -> dict[str, Any]:
    """One conversation, one request in flight; at the turns named, the engine is asked for the same ids.

    `added` has, by turn, milliseconds through the proxy and then straight from the engine.
    """
    conversation = Conversation(material, command["seed"], command["turns"], "proxy")
    wanted, added, tally = set(command["at"]), [], Tally()
    path = command["path"].replace("NAME", command["name"])
    async with Connection(command["url"]) as proxy, Connection(command["engine"]) as engine:
        for turn in range(command["turns"]):
            response = await proxy.post(path, [conversation.ask(turn)])
            conversation.hear(turn, response)
            tally.add(response)
            if turn in wanted:
                [request] = orjson.loads((await engine.get("/scripted/seen")).body)
                for key in ("output_ids", "logprobs", "weight_versions", "finish_reason"):
                    request.pop(key)
                direct = await engine.post("/generate", [orjson.dumps(request)])
                if direct.status != 200:
                    raise WrongReply(f"the engine, asked directly: {direct.status}")
                added.append((turn, 1e3 * response.whole_s, 1e3 * direct.whole_s))
        await _finish(command["url"], [command["name"]], tally)
    return tally.as_json() | {"added": added}


async def big(material: Material, command: dict[str, Any]) -> dict[str, Any]:
    """`count` requests at once, each the first of a trajectory with an image of `size` bytes of base64."""
    tally = Tally()
    image = base64.b64encode(os.urandom(command["size"] * 3 // 4))

    async def one(seed: int) -> None:
        number = material.reply_number(seed, 0, last=True)
        question = marked(material.tasks[seed % len(material.tasks)], number)
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{seed:08d}IMAGE"}}
        content = [picture, {"type": "text", "text": question}]
        body = orjson.dumps({"model": "bench", "messages": [{"role": "user", "content": content}]} | SAMPLING)
        head, tail = body.split(b"IMAGE", 1)
        path = command["path"].replace("NAME", f"{command['name']}-{seed}")
        try:
            async with Connection(command["url"], command["timeout_s"]) as connection:
                response = await connection.post(path, [head, image, tail])
            message = orjson.loads(response.body)["choices"][0]["message"]
            if response.status != 200 or message["content"] != material.replies[number].content:
                raise WrongReply(f"status {response.status}: {response.body[:300]!r}")
        except (OSError, TimeoutError, WrongReply, LookupError, ValueError) as error:
            tally.fail(f"{error!r}")
            return
        tally.add(response)

    begun = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(command["count"])))
    return tally.as_json() | {"wall_s": time.perf_counter() - begun}


COMMANDS = {"turns": turns, "pairs": pairs, "big": big}


def main() -> None:
    """Execute commands until stdin ends."""
    end_with_parent()
    material = Material.read(Path(sys.argv[1]))
    obey(lambda command: uvloop.run(COMMANDS[command["do"]](material, command)))


if __name__ == "__main__":
    main()
