"""A desk: turns taken in this process, by an engine that samples ids no tokenizer would give."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook import store
from rollbook.engines.engine import Generation
from rollbook.ingest.endpoints.chat import API as CHAT_API
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.tokens.bridge import Bridges, TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.store.events import VersionSpan, token_ids
from rollbook.store.fold.trajectory import Trajectory, fold


@dataclass
class NoisyEngine:
    """Answers with a script's text in ids that are mostly not the tokenizer's, with made-up logprobs."""

    tokenizer: ChatTokenizer
    answers: Callable[[Any, Any], Any]
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    version: int = 3
    name: str = "noisy"
    honoured: frozenset[str] = frozenset({"temperature", "seed", "logprobs"})
    takes_images: bool = False
    sent: list[np.ndarray] = field(default_factory=list)
    made: list[Generation] = field(default_factory=list)

    async def start(self, activated: Any) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """Nothing to stop."""

    def policy_version(self) -> int | None:
        """The version it claims."""
        return self.version

    def control(self) -> None:
        """No routes."""

    def ids_of(self, text: str) -> list[int]:
        """Ids of the text cut at random places, so that they are rarely canonical."""
        ids: list[int] = []
        while text:
            size = self.rng.randint(1, 5)
            ids += self.tokenizer.encode(text[:size]).tolist()
            text = text[size:]
        return ids

    def failure(self) -> str | None:
        """It never ends."""
        return None

    async def ready(self) -> None:
        """It always is."""

    async def abort(self, request_id: str) -> None:
        """It runs to its end."""

    async def generate(
        self, prompt: Any, sampling: Any, on_tokens: Any = lambda ids, logprobs: None
    ) -> Generation:
        """The script's answer: a text, or (text, finish, last id or None)."""
        self.sent.append(prompt.ids)
        answer = self.answers(prompt.messages, prompt.tools)
        if asyncio.iscoroutine(answer):
            answer = await answer
        stop = self.tokenizer.stop_ids[0]
        text, finish, last = answer if isinstance(answer, tuple) else (answer, "stop", stop)
        ids = self.ids_of(text) + ([] if last is None else [last])
        logprobs = np.array([-self.rng.random() for _ in ids], np.float32)
        spans = (VersionSpan("actor", self.version, 0, len(ids)),)
        generation = Generation(
            token_ids(ids), logprobs, spans, finish, {"kind": "sampled", "temperature": 0.5}
        )
        self.made.append(generation)
        return generation


@functools.cache
def _tested(tokenizer: ChatTokenizer, policy: TreePolicy | None) -> Bridges:
    return Bridges.tested(tokenizer, policy)


def bridges_of(tokenizer: ChatTokenizer, policy: TreePolicy | None = None) -> Bridges:
    """A tokenizer's bridges, tested once: the test takes longer than most of what a desk is made for.

    Each caller has its own, since a conversation may show that excerpts do not serve.
    """
    return replace(_tested(tokenizer, policy))


def make_turn_runner(
    recorder: Recorder, engine: Any, tokenizer: ChatTokenizer, policy: TreePolicy | None = None
) -> TurnRunner:
    """A turn turn_runner that reads replies in the Hermes form."""
    return TurnRunner(recorder, engine, bridges_of(tokenizer, policy), FAMILIES["hermes"])


class Desk:
    """A recorder, an engine and a turn turn_runner over a store of their own."""

    def __init__(
        self,
        path: Path,
        tokenizer: ChatTokenizer,
        answers: Callable[[Any, Any], Any],
        policy: TreePolicy | None = None,
    ) -> None:
        self.store = store.open(path, create=True)
        self.tokenizer = tokenizer
        self.recorder = Recorder(self.store, "serve", "default")
        self.engine = NoisyEngine(tokenizer, answers)
        self.turn_runner = make_turn_runner(self.recorder, self.engine, tokenizer, policy)
        self.runner = asyncio.Runner()

    def take(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn, taken and marked as delivered."""
        return self.runner.run(self.take_async(messages, name, **body))

    async def take_async(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn, taken and marked as delivered."""
        live, running = self.begin(messages, name, **body)
        [answered] = await asyncio.shield(running.done)
        self.recorder.mark_delivered(live, answered.turn_id, "sent")
        return answered

    def take_undelivered(self, messages: list[Any], name: str = "t", **body: Any) -> CompletedTurn:
        """One turn whose reply the client never got."""

        async def take() -> CompletedTurn:
            _, running = self.begin(messages, name, **body)
            [answered] = await running.done
            return answered

        return self.runner.run(take())

    def begin(self, messages: list[Any], name: str = "t", **body: Any) -> tuple[LiveTrajectory, InFlightCall]:
        """One request, begun."""
        live = self.recorder.find(name) or self.recorder.draft(OpenTrajectory(id=name))
        raw = orjson.dumps({"messages": messages} | body)
        call = CHAT_API.read(orjson.loads(raw), lambda turn_id: None)
        return live, self.turn_runner.begin(live, call, Arrival.of(call.endpoint, raw, 0))

    def trajectory(self, name: str = "t") -> Trajectory:
        """The trajectory as it can be folded from the log now."""
        self.runner.run(self.recorder.settle())
        return next(t for t in fold(self.store.events()).values() if t.opened.name == name)

    def turn(self, answered: CompletedTurn, name: str = "t") -> Any:
        """A turn as folded from the log."""
        return self.trajectory(name).turns[answered.turn_id]

    def link(self, answered: CompletedTurn, name: str = "t") -> str | None:
        """The turn's parent id, or `root:` and the reason."""
        request = self.turn(answered, name).requested
        return request.parent_turn_id or f"root:{request.root_reason}"

    def close(self) -> None:
        """Close the recorder."""
        self.runner.close()
        self.recorder.close()
