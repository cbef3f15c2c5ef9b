"""A desk that remembers what its engine saw of each turn, and can be closed and opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tests.fakes.proxies.desk import Desk, NoisyEngine

from rollbook.engines.engine import Generation
from rollbook.ingest.endpoints import chat, completions
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.recording.turn_records import Arrival
from rollbook.ingest.replies.family import Family
from rollbook.ingest.tokens.bridge import TreePolicy
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.ingest.turns.in_flight import CompletedTurn, InFlightCall
from rollbook.store.events import Json, VersionSpan, token_ids
from rollbook.store.fold.trajectory import Trajectory


@dataclass(frozen=True)
class Made:
    """What the engine was sent for a turn, and what it gave."""

    prompt: np.ndarray
    generation: Generation
    images: tuple[str, ...]


@dataclass
class SeenEngine(NoisyEngine):
    """Remembers each turn by its id. An answer is a text, or (text, finish, last id or None), or an error.

    `swaps` is after how many ids the weights change in mid-completion (None: never).
    """

    seen: dict[str, Made] = field(default_factory=dict)
    swaps: int | None = None

    async def generate(
        self, prompt: Any, sampling: Any, on_tokens: Any = lambda ids, logprobs: None
    ) -> Generation:
        """The next answer."""
        answer = self.answers(prompt.messages, prompt.tools)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        text, finish, last = (
            answer if isinstance(answer, tuple) else (answer, "stop", self.tokenizer.stop_ids[0])
        )
        ids = self.ids_of(text) + ([] if last is None else [last])
        logprobs = np.array([-self.rng.random() for _ in ids], np.float32)
        generation = Generation(
            token_ids(ids), logprobs, self._spans(len(ids)), finish, {"kind": "sampled", "temperature": 0.5}
        )
        on_tokens(ids, logprobs.tolist())
        self.sent.append(prompt.ids)
        self.made.append(generation)
        self.seen[prompt.request_id] = Made(prompt.ids, generation, prompt.images)
        return generation

    def _spans(self, length: int) -> tuple[VersionSpan, ...]:
        if self.swaps is None or not 0 < self.swaps < length:
            return (VersionSpan("actor", self.version, 0, length),)
        self.version += 1
        return (
            VersionSpan("actor", self.version - 1, 0, self.swaps),
            VersionSpan("actor", self.version, self.swaps, length),
        )


class TokenDesk(Desk):
    """A desk whose engine is a `SeenEngine`."""

    engine: SeenEngine

    def __init__(
        self,
        path: Path,
        tokenizer: ChatTokenizer,
        answers: Callable[[Any, Any], Any],
        policy: TreePolicy | None = None,
        family: Family | None = None,
    ) -> None:
        super().__init__(path, tokenizer, answers, policy)
        self.engine = SeenEngine(tokenizer, answers)
        self._serve(family or self.turn_runner.family)

    def _serve(self, family: Family) -> None:
        self.turn_runner = TurnRunner(self.recorder, self.engine, self.turn_runner.bridges, family)

    def restart(self) -> None:
        """Close the recorder, and open another one that has only the log to go by."""
        self.runner.run(self.turn_runner.drained())
        self.recorder.close()
        self.recorder = Recorder(self.store, "serve", "default")
        self._serve(self.turn_runner.family)

    def begin(self, messages: list[Any], name: str = "t", **body: Any) -> tuple[LiveTrajectory, InFlightCall]:
        """One request, begun."""
        return self.begin_body({"messages": messages} | body, name)

    def begin_body(self, body: Json, name: str = "t") -> tuple[LiveTrajectory, InFlightCall]:
        """One request for a chat completion, or for the completion of a prompt, begun."""
        live = self.recorder.find(name) or self.recorder.draft(OpenTrajectory(id=name))
        raw = orjson.dumps(body)
        endpoint = completions.API if "prompt" in body else chat.API
        call = endpoint.read(orjson.loads(raw), lambda turn_id: None)
        return live, self.turn_runner.begin(live, call, Arrival.of(call.endpoint, raw, 0))

    def take_all(self, *bodies: Json, name: str = "t", delivered: bool = True) -> list[list[CompletedTurn]]:
        """Requests at once: the siblings that each became."""

        async def take() -> list[list[CompletedTurn]]:
            begun = [self.begin_body(body, name) for body in bodies]
            answered = [await asyncio.shield(running.done) for _, running in begun]
            for (live, _), turns in zip(begun, answered, strict=True):
                for turn in turns if delivered else ():
                    self.recorder.mark_delivered(live, turn.turn_id, "sent")
            return answered

        return self.runner.run(take())

    def complete(self, prompt: Any, name: str = "t", **body: Any) -> CompletedTurn:
        """The completion of a raw prompt."""
        [[turn]] = self.take_all({"prompt": prompt} | body, name=name)
        return turn

    def trajectories(self) -> list[Trajectory]:
        """All of them, as they can be folded from the log now."""
        self.runner.run(self.recorder.settle())
        return list(self.store.trajectories().values())
