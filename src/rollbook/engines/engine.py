"""What the proxy asks of an engine: ids in, ids out, and which policy version made each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter

from rollbook.store.events import Json, Logprobs, TokenIds, VersionSpan


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, in SGLang's and vLLM's terms. `temperature` 0 is greedy.

    `seed` decides every draw of this request. `top_k` -1 keeps all tokens. `stop` strings end a turn; the
    ids keep the token that completed one. `stop_ids` are the tokens that do, which the ids keep too; None:
    those of the model. `constraint` masks the logits: one of `json_schema`, `json_object`,
    `regex` or `ebnf`, with its value; logprobs are then of the masked distribution. `top` is how many of the
    likeliest tokens are wanted in each place.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    logit_bias: Json | None = None
    constraint: Json | None = None
    stop_ids: tuple[int, ...] | None = None
    top: int = 0

    def as_json(self) -> Json:
        """The form recorded with the turn: the first three, and every other field that differs from
        its default."""
        differing: Json = {}
        for name, default in _DEFAULTS:
            value = getattr(self, name)
            if value != default:
                differing[name] = list(value) if type(value) is tuple else value
        return differing


_DEFAULTS = tuple((field.name, field.default) for field in fields(Sampling))
"""Field by field; what has no default differs from it always."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as ids, and as the messages they were rendered from (a scripted teacher reads those).

    Attributes:
        request_id: unique; `Engine.abort` goes by it.
        trajectory_id: requests of one trajectory share prefixes, so an engine may keep them together.
        images: data URLs or links, in the order of their places in the messages.
        known_tokens: of `ids`, those of the parent's prompt and completion; 0 for a root.
        adapter: name of the low-rank adapter to sample with, one that the engine holds; "": of none.
    """

    ids: TokenIds
    messages: Sequence[Json]
    tools: Sequence[Json] | None
    request_id: str = ""
    trajectory_id: str = ""
    images: tuple[str, ...] = ()
    known_tokens: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The likeliest tokens at each position, the likeliest first.

    Attributes:
        ids: [positions, k].
        logprobs: [positions, k]; NaN: there is no token in this place.
    """

    ids: TokenIds
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """An engine's answer. `finish_reason` is stop, length or abort; spans cover the completion.

    `routed_experts` are packed as in the log, from the first position whose experts the parent's
    do not hold. `top` has the likeliest tokens in the place of each, where they were asked for and the engine
    tells them.
    """

    completion_ids: TokenIds
    logprobs: Logprobs | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    logprob_semantics: Json
    timings: Json = field(default_factory=dict)
    routed_experts: Json = field(default_factory=dict)
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Logprobs of given tokens behind those before them.

    Attributes:
        logprobs: [tokens]; the first is NaN, as nothing stands before it.
        top: the likeliest in the place of each, where they were asked for.
    """

    logprobs: Logprobs
    top: TopTokens | None = None


Activated = Callable[[int, str, Path], Awaitable[None]]
"""Called with (policy version, weights digest, path) once the weights in memory are verified."""

OnTokens = Callable[[Sequence[int], Sequence[float] | None], None]
"""Called with the ids sampled since the last call, and their logprobs where there are any."""


def ignore_tokens(ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
    """An `OnTokens` for callers that need only the whole completion."""


class Engine(Protocol):
    """An engine. Methods are called on the proxy's event loop."""

    name: str
    honoured: frozenset[str]
    """Request fields it acts on; others are accepted, recorded and reported as not honoured."""
    takes_images: bool

    async def start(self, activated: Activated) -> None:
        """Get ready to generate; `activated` is awaited before tokens come from other weights."""

    async def close(self) -> None:
        """Stop; running requests fail."""

    async def ready(self) -> None:
        """Return once the engine takes requests; it takes none while its weights are being replaced."""

    async def generate(self, prompt: Prompt, sampling: Sampling, on_tokens: OnTokens) -> Generation:
        """Sample a completion. The tokens passed to `on_tokens` are a prefix of those returned.

        Raises:
            EngineError: the engine failed; nothing was sampled that counts.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request: its `generate` returns what there is, with finish reason abort.

        An engine that cannot do so lets it run to its end.
        """

    def policy_version(self) -> int | None:
        """The version being served, or None for an engine without weights."""

    def failure(self) -> str | None:
        """Why the engine cannot answer any more, or None."""

    def control(self) -> APIRouter | None:
        """Routes that control it, served under `/engine`."""


class ServesAdapters(Engine, Protocol):
    """An engine that samples with low-rank adapters beside its weights, many at once."""

    vocabulary: int
    context_length: int

    async def load_adapter(self, name: str, folder: Path, digest: str) -> None:
        """Hold an adapter from here on; one that it holds by this name is left as it is.

        Args:
            folder: with PEFT's files.
            digest: of the factors (`engines.weights.digests`), to which those in memory are compared.

        Raises:
            EngineError: it cannot be read or does not fit the model, or is another than the digest says.
        """

    async def unload_adapter(self, name: str) -> None:
        """Hold an adapter no more; no request uses it."""

    async def score(self, ids: TokenIds, adapter: str, temperature: float, top: int) -> Scores:
        """The logprobs of tokens, by softmax(logits / temperature), and of the `top` likeliest.

        One whose `Generation.top` has the likeliest need know no other temperature than 1.

        Raises:
            EngineError: the engine failed.
        """


class ServesWeights(ServesAdapters, Protocol):
    """An engine whose weights may be replaced by those of another model of the same architecture."""

    async def load_weights(self, folder: Path, version: int, digest: str) -> None:
        """Serve other weights from here on; no request is under way.

        Args:
            folder: a Hugging Face model directory.
            version: of its policy.
            digest: of the weights (`engines.weights.digests`), to which those in memory are compared.

        Raises:
            EngineError: they cannot be read or do not fit, or are others than the digest says.
        """
