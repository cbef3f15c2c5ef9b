"""A request that is being answered: its turns as they are sampled, and who waits for them.

Every API's reply is made from a completed, durable turn: from its two events alone, so a retry after a
crash gets the same reply.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from rollbook.engines.engine import Sampling
from rollbook.ingest.replies.family import Parsed
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.reply import NOTHING, GrowingReply, ReplyReader
from rollbook.store.events import Json, TurnCompleted, TurnRequested


class InFlightTurn:
    """One completion of the request. Its ids come in through `add`."""

    def __init__(
        self, requested: TurnRequested, sampling: Sampling, reader: ReplyReader, *, grows: bool
    ) -> None:
        self.requested, self.sampling = requested, sampling
        self.ended = False
        """Whether its outcome is recorded, or is being recorded."""
        self.ids: list[int]
        self.logprobs: list[float]
        self.grows = grows
        self._reader = reader
        self._begin()

    def _begin(self) -> None:
        self.ids, self.logprobs = [], []
        self._growing = GrowingReply(self._reader) if self.grows else None
        self._certain = NOTHING
        self._read = 0

    def again(self, requested: TurnRequested) -> None:
        """Start over as another turn: the earlier one failed before a client saw any of it."""
        self.requested, self.ended = requested, False
        self._begin()

    @property
    def turn_id(self) -> str:
        """The turn's id; the engine knows the request by it too."""
        return self.requested.turn_id

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Take what was sampled."""
        self.ids += ids
        self.logprobs += logprobs or ()
        if self._growing is not None:
            self._growing.feed(ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._growing is not None and self._growing.stopped

    def certain(self) -> Parsed:
        """The beginning of the reply that no later token can change."""
        if self._growing is not None and self._read != len(self.ids):
            self._read = len(self.ids)
            self._certain = self._growing.certain()
        return self._certain


class InFlightCall:
    """A request while it is answered. `done` resolves to its durable turns, or to the error.

    Several connections may wait for it: a retry joins the request that it repeats.
    """

    def __init__(
        self,
        call: ModelCall,
        turns: Sequence[InFlightTurn],
        reader: ReplyReader,
        items: list[Any] | None = None,
    ) -> None:
        self.call, self.turns, self.reader, self.items = call, list(turns), reader, items
        self.first = turns[0].requested
        """The record with the whole request; those of its siblings hold only what differs."""
        self.depends_on: list[Future[int] | None] = []
        """Appends that must be durable before a reply may end; None: one that is durable already."""
        self.done: asyncio.Future[list[CompletedTurn]] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(self._finished)
        self._listeners: set[asyncio.Event] = set()
        self.abandoned = False
        """Whether all clients that waited have gone."""
        self.shown = False
        """Whether any client was sent a byte of the reply."""
        self.counted = False
        """Whether the metrics have counted it."""

    def listen(self) -> asyncio.Event:
        """An event that is set whenever there is more to send. Pass it to `leave` at the end."""
        event = asyncio.Event()
        self._listeners.add(event)
        return event

    def leave(self, event: asyncio.Event) -> bool:
        """Stop listening. Returns whether the request still runs without a listener."""
        self._listeners.discard(event)
        self.abandoned = not self._listeners and not self.done.done()
        return self.abandoned

    def changed(self) -> None:
        """Wake all listeners: there is more to send."""
        for event in self._listeners:
            event.set()

    def _finished(self, done: asyncio.Future[list[CompletedTurn]]) -> None:
        if not done.cancelled():
            done.exception()  # marks the exception as retrieved, where no listener waits any more
        self.changed()


LOWEST = -9999.0
"""The logprob that OpenAI's API gives for a token of probability zero."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletedTurn:
    """One completion: what was asked, what came back."""

    requested: TurnRequested
    completed: TurnCompleted

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.completed.turn_id

    @property
    def reply(self) -> Json:
        """The message, in chat form."""
        return self.completed.reply

    @property
    def created(self) -> int:
        """When it was requested, in seconds, from its id."""
        return created_s(self.turn_id)

    @property
    def calls(self) -> list[Json]:
        """Its tool calls."""
        return self.reply.get("tool_calls") or []


def created_s(turn_id: str) -> int:
    """The time a UUIDv7 was made, in seconds since 1970."""
    return int(UUID(turn_id).int >> 80) // 1000


def usage_tokens(turns: Sequence[CompletedTurn]) -> tuple[int, int]:
    """(tokens of the prompt, tokens sampled), over the siblings of one request."""
    return turns[0].completed.prompt_length, sum(len(t.completed.completion_ids) for t in turns)


def logprob_entry(tokenizer: ChatTokenizer, token_id: int, logprob: float) -> Json:
    """A token as OpenAI's chat completions list it; `token_id` is our addition."""
    text = tokenizer.decode([token_id], special=True)
    value = logprob if math.isfinite(logprob) else LOWEST
    whole = list(text.encode()) if "�" not in text else None
    return {"token": text, "logprob": value, "bytes": whole, "top_logprobs": [], "token_id": token_id}
