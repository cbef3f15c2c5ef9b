"""What an attack is, and what it can use: it acts as one of many clients, with at most a
trajectory's key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from rollbook.bench.hostile.sender import ANSWER_S, CUT, Answer, Wire, connected, request

OK = (200, 201)
REFUSED = (CUT, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 417, 421, 422, 429, 431, 501, 503)
"""What may come where nothing may be let in: a refusal in any words, or the end of the connection."""
ANYTHING = (*OK, *REFUSED, 499, 502, 504)
"""What may come where it is no matter; a 500 never is."""

REFUSED_S = 0.05
"""After a connection that was refused, before the next."""

TOKENS, RECORD = "tokens", "record"
"""Proxies: that which makes the ids itself, and that which records what passes to an upstream."""


class Process(Protocol):
    """The proxy's process, for attacks on its resources."""

    folder: Any

    @property
    def pid(self) -> int: ...


@dataclass(slots=True)
class Tally:
    """The outcome of an attack."""

    answers: Counter[int] = field(default_factory=Counter)
    wrong_200: list[str] = field(default_factory=list)
    errors_500: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """Other answers than those that may come."""

    def add(self, what: str, answer: Answer, allowed: Collection[int]) -> None:
        """Count an answer."""
        self.answers[answer.status] += 1
        text = f"{what}: {answer.status} {answer.body[:200]!r}"
        if answer.status == 500:
            self.errors_500.append(text)
        elif answer.status in OK and answer.status not in allowed:
            self.wrong_200.append(text)
        elif answer.status not in allowed:
            self.strange.append(text)


@dataclass(slots=True)
class Ground:
    """Where an attack takes place.

    Attributes:
        operator: a key with which keys of trajectories are made; attacks send none but those.
        victim: name of an honest trajectory that is open.
        over: set when the attack is to end.
        process: the proxy's.
        kind: of the proxy.
    """

    url: str
    operator: str
    victim: str
    process: Process
    rng: random.Random
    kind: str = TOKENS
    tally: Tally = field(default_factory=Tally)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Host and port, as a Host header has them."""
        return urlsplit(self.url).netloc

    @property
    def makes_ids(self) -> bool:
        """Whether the proxy makes the ids, and so reads every field."""
        return self.kind == TOKENS

    def name(self) -> str:
        """A name that no trajectory has yet."""
        return f"mallory-{self.rng.getrandbits(48):x}-{next(self.numbers)}"

    async def key(self, name: str) -> str:
        """The key of a trajectory, which is opened if it is new."""
        if name not in self.keys:
            body = orjson.dumps({"id": name})
            headers = {"Authorization": f"Bearer {self.operator}", "Content-Type": "application/json"}
            answer = await self.send(request("POST", "/v1/trajectories", self.host, headers, body))
            if answer.status != 201:
                return ""
            self.keys[name] = orjson.loads(answer.body)["api_key"]
        return self.keys[name]

    @contextlib.asynccontextmanager
    async def wire(self, *, small_window: bool = False) -> AsyncIterator[Wire]:
        """A connection to the proxy."""
        host, _, port = self.host.rpartition(":")
        async with connected(host, int(port), small_window=small_window) as wire:
            yield wire

    async def send(self, data: bytes, seconds: float = ANSWER_S) -> Answer:
        """Send bytes over a connection of their own; the first answer."""
        try:
            async with self.wire() as wire:
                await wire.send(data)
                return await wire.answer(seconds)
        except OSError:
            await asyncio.sleep(REFUSED_S)
            return Answer(CUT)

    async def ask(
        self,
        path: str | bytes,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        key: str | None = None,
        allowed: Collection[int] = REFUSED,
        seconds: float = ANSWER_S,
    ) -> Answer:
        """One request, whose answer is counted.

        Args:
            body: bytes as they are, anything else as JSON.
            key: sent as a bearer token.
        """
        raw = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        fields = {"Content-Type": "application/json"} if raw is not None else {}
        fields |= {"Authorization": f"Bearer {key}"} if key else {}
        fields |= dict(headers or {})
        answer = await self.send(request(method, path, self.host, fields, raw), seconds)
        self.tally.add(f"{method} {path!r:.80}", answer, allowed)
        return answer

    async def chat(self, name: str, content: Any, *, allowed: Collection[int] = OK, **more: Any) -> Answer:
        """A chat request in a trajectory of the attacker's, with its key; `headers` may be given by
        name."""
        headers = more.pop("headers", None)
        body = {"model": "m", "messages": [{"role": "user", "content": content}]} | more
        path = f"/t/{name}/v1/chat/completions"
        return await self.ask(path, body, headers, key=await self.key(name), allowed=allowed)

    def check(self, what: str, answer: Answer, allowed: Collection[int]) -> None:
        """Count an answer that came over a connection of the attack's own."""
        self.tally.add(what, answer, allowed)


Volley = Callable[[Ground], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of attack; `says` states what is attacked and what must hold.

    Attributes:
        proxies: the kinds it is for.
        at_once: how many of its volleys run concurrently.
        pause_s: between two volleys, so that it is not only the attacker's own work that is
            felt.
        refuses: honest requests may be refused meanwhile: nothing can be recorded.
    """

    name: str
    says: str
    volley: Volley
    proxies: tuple[str, ...] = (TOKENS,)
    at_once: int = 2
    pause_s: float = 0.1
    refuses: bool = False


ATTACKS: dict[str, Attack] = {}
"""All of them by name, once the modules that hold them are imported."""


def attack(**options: Any) -> Callable[[Volley], Volley]:
    """Register a function as an attack: its name is the attack's, its docstring states what must hold."""

    def add(volley: Volley) -> Volley:
        name = volley.__name__
        says = " ".join((volley.__doc__ or "").split())
        ATTACKS[name] = Attack(name, says, volley, **options)
        return volley

    return add


async def carry_out(chosen: Attack, ground: Ground, seconds: float) -> None:
    """Repeat an attack for so long; what still runs two seconds later is cancelled.

    Raises:
        Exception: the attack's own fault.
    """

    async def again() -> None:
        while not ground.over.is_set():
            await chosen.volley(ground)
            await asyncio.sleep(chosen.pause_s)

    tasks = [asyncio.create_task(again()) for _ in range(chosen.at_once)]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    ground.over.set()
    if not done:
        done, _ = await asyncio.wait(tasks, timeout=2.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
