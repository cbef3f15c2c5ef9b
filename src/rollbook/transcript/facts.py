"""The facts of one trajectory, as frozen values and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from rollbook.store.events import Json, Logprobs, TokenIds, VersionSpan
from rollbook.transcript.messages import Message

EXACT, TEXT_ONLY, ERASED, MIXED = "exact", "text_only", "erased", "mixed"
"""Of a turn: its sampled ids are here; it never had any; they were erased. Of several: not all the same."""
COMPLETED, FAILED, RUNNING = "completed", "failed", "running"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that is not superseded."""

    source: str
    reward: float


@dataclass(frozen=True, slots=True)
class Label:
    """A note or tag that was added later."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A completed turn's reply and tokens.

    Attributes:
        context_ids: the part of the prompt that is new in this turn.
        prompt_tokens: how many tokens the whole prompt has.
        logprobs: null where the engine gave none.
    """

    reply: Message
    finish_reason: str
    flags: tuple[str, ...]
    policy: str | None
    spans: tuple[VersionSpan, ...]
    fidelity: str
    prompt_tokens: int
    context_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs | None
    mean_logprob: float | None
    min_logprob: float | None
    timings: Json


@dataclass(frozen=True, slots=True, eq=False)
class TurnFacts:
    """One model call. `number` counts the trajectory's turns from 1, as they were asked.

    Attributes:
        parent: the turn it extends; null for a root, whose `root_reason` says why it is one.
        messages: those the request does not share with that of `base`.
        choice: its place among the siblings of a request for several replies.
        retry: how often the client had sent the request before, where it says so.
        latency_ms: from the request to the answer, or to the failure, by the writer's clock.
        delivered: how the client came to have the reply; null if it is not known to.
    """

    number: int
    turn_id: str
    parent: str | None
    root_reason: str | None
    base: str | None
    shared_messages: int
    endpoint: str
    choice: int | None
    retry: int | None
    requested_us: int
    requested_model: str | None
    sampling: Json
    not_honoured: tuple[str, ...]
    messages: tuple[Message, ...]
    status: str
    error: str | None
    latency_ms: float | None
    delivered: str | None
    answer: Answer | None
    rewards: tuple[Reward, ...]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryFacts:
    """One trajectory.

    Attributes:
        status: open until it is finished.
        tokens: each stored once, however many turns share it; `sampled` of them were sampled.
        fidelity: of all completed turns; null where there is none.
        erased: why its text was erased.
        origin: of split `replay`, what was sampled again, as of `trajectory.opened`.
    """

    name: str
    trajectory_id: str
    run: str
    lane: str
    group: str | None
    task: str | None
    split: str
    labels: Json
    added_labels: tuple[Label, ...]
    status: str
    success: bool | None
    opened_us: int
    finished_us: int | None
    erased: str | None
    rewards: tuple[Reward, ...]
    turns: tuple[TurnFacts, ...]
    tokens: int
    sampled: int
    fidelity: str | None
    origin: Json | None = None

    def as_json(self, *, tokens: bool = False) -> Json:
        """All of it as plain JSON values; with token ids and logprobs only if asked."""
        values: Json = plain(self, without=("turns",))
        values["turns"] = [_turn_json(turn, tokens) for turn in self.turns]
        return values

    def versions(self) -> list[int]:
        """Every policy version that sampled some of it, ascending."""
        return sorted({s.version for t in self.turns if t.answer is not None for s in t.answer.spans})


def _turn_json(turn: TurnFacts, tokens: bool) -> Json:
    values: Json = plain(turn, without=("answer",))
    values["answer"] = None
    if turn.answer is not None:
        arrays = ("context_ids", "completion_ids", "logprobs")
        counts = {
            "context_tokens": len(turn.answer.context_ids),
            "completion_tokens": len(turn.answer.completion_ids),
        }
        values["answer"] = plain(turn.answer, without=() if tokens else arrays) | counts
    return values


def plain(value: Any, *, without: Collection[str] = ()) -> Any:
    """Dataclasses as objects, arrays as lists, and numbers that JSON does not have as words, such as `NaN`.

    Args:
        without: fields of the outermost dataclass to leave out.
    """
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name not in without}
    if isinstance(value, np.ndarray):
        return plain(value.tolist()) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
