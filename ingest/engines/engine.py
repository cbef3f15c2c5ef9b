"""What the proxy asks of an engine: ids in, ids out, and which policy version made each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter

from rollbook.store.events import Json, Logprobs, TokenIds, VersionSpan


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. `seed` decides every draw of this request."""

    max_new_tokens: int
    temperature: float
    seed: int

    def as_json(self) -> Json:
        """As it is recorded with the turn."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as ids, and as the messages they were rendered from (a scripted teacher reads those)."""

    ids: TokenIds
    messages: Sequence[Json]
    tools: Sequence[Json] | None


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """An engine's answer. `finish_reason` is stop or length; spans cover the completion."""

    completion_ids: TokenIds
    logprobs: Logprobs | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    logprob_semantics: Json
    timings: Json = field(default_factory=dict)


Activated = Callable[[int, str, Path], Awaitable[None]]
"""Told (policy version, weights digest, path) once the weights in memory are verified."""


class Engine(Protocol):
    """An engine. Methods are called on the proxy's event loop."""

    name: str
    honoured: frozenset[str]
    """Request fields it acts on; others are accepted, recorded and reported as not honoured."""

    async def start(self, activated: Activated) -> None:
        """Get ready to generate; `activated` is awaited before tokens come from other weights."""

    async def close(self) -> None:
        """Stop; running requests fail."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Sample a completion.

        Raises:
            EngineError: the engine failed; nothing was sampled that counts.
        """

    def policy_version(self) -> int | None:
        """The version being served, or None for an engine without weights."""

    def failure(self) -> str | None:
        """Why it can answer nothing any more, or None."""

    def control(self) -> APIRouter | None:
        """Routes that control it, served under `/engine` on loopback only."""
