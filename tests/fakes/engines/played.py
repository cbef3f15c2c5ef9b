"""An engine that plays the ids a test gives it, in the pieces and at the moments that the test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollbook.engines.engine import Generation, OnTokens, Prompt, Sampling, ignore_tokens
from rollbook.store.events import VersionSpan, token_ids

ALL_FIELDS = frozenset({"temperature", "top_p", "stop", "seed", "logprobs", "response_format"})


@dataclass(frozen=True, slots=True)
class Play:
    """What is sampled: a text, or ids as they are, and how it ends."""

    said: str | Sequence[int]
    finish: str = "stop"
    ends: bool = True
    """Whether the end-of-turn token is the last id of a text."""


class PlayedEngine:
    """Asks `answer(prompt, sampling)` for a text, a `Play` or an exception.

    `pace`: pieces that may still be said; None: all of them at once. `doors`: cleared, nothing comes in.
    """

    name = "played"

    def __init__(self, tokenizer: Any, answer: Any = "Hello") -> None:
        self.tokenizer = tokenizer
        self.answer: Callable[[Prompt, Sampling], Any] = answer if callable(answer) else lambda *_: answer
        self.sizes: Callable[[], Iterator[int]] = lambda: itertools.repeat(1)
        self.honoured, self.takes_images = ALL_FIELDS, False
        self.version: int | None = 5
        self.pace: asyncio.Semaphore | None = None
        self.doors = asyncio.Event()
        self.doors.set()
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []
        self.made: list[Generation] = []
        self.aborted: list[str] = []
        self._running: dict[str, asyncio.Event] = {}

    async def start(self, activated: Any) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """End what still runs, as after a test that failed in the middle."""
        self.doors.set()
        for ended in self._running.values():
            ended.set()

    async def ready(self) -> None:
        """Wait for the doors."""
        await self.doors.wait()

    def policy_version(self) -> int | None:
        """The version it claims."""
        return self.version

    def failure(self) -> str | None:
        """It never ends."""
        return None

    def control(self) -> None:
        """No routes."""

    async def look(self) -> list[Any]:
        """Nothing to be said of a model."""
        return []

    def held(self) -> None:
        """No weights."""

    async def verify(self) -> None:
        """It knows its version."""

    def unverified(self) -> None:
        """It knows its version."""

    def doubtful(self) -> bool:
        """It knows its version."""
        return False

    def synced(self, version: int) -> None:
        """It claims what it claimed before."""

    async def abort(self, request_id: str) -> None:
        """End a request with what it has said."""
        self.aborted.append(request_id)
        if request_id in self._running:
            self._running[request_id].set()

    async def generate(
        self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens = ignore_tokens
    ) -> Generation:
        """Play the answer."""
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        answer = self.answer(prompt, sampling)
        if isinstance(answer, Exception):
            raise answer
        play = answer if isinstance(answer, Play) else Play(answer)
        ids = self._ids(play)
        logprobs = [-0.125 * (1 + place % 7) for place in range(len(ids))]
        ended = self._running[prompt.request_id] = asyncio.Event()
        done = 0
        sizes = self.sizes()
        while done < len(ids) and await self._may_go_on(ended):
            end = done + max(next(sizes, 1), 1)
            on_tokens(ids[done:end], logprobs[done:end])
            done = min(end, len(ids))
        del self._running[prompt.request_id]
        spans = () if self.version is None else (VersionSpan("actor", self.version, 0, done),)
        finish = play.finish if done == len(ids) else "abort"
        numbers = np.array(logprobs[:done], np.float32)
        generation = Generation(token_ids(ids[:done]), numbers, spans, finish, {"kind": "sampled"})
        self.made.append(generation)
        return generation

    def _ids(self, play: Play) -> list[int]:
        if not isinstance(play.said, str):
            return list(play.said)
        ids: list[int] = self.tokenizer.encode(play.said).tolist()
        return ids + ([self.tokenizer.stop_ids[0]] if play.ends else [])

    async def _may_go_on(self, ended: asyncio.Event) -> bool:
        """Whether the next piece may come, once it may; not after an abort."""
        if self.pace is None:
            await asyncio.sleep(0)
            return not ended.is_set()
        waiting = {asyncio.create_task(self.pace.acquire()), asyncio.create_task(ended.wait())}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return not ended.is_set()
