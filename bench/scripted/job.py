"""One request at a scripted SGLang, from its first token to its end, answered with a script's ids,
cut where the real server would stop.

The server that sends the answers is `bench.scripted.sglang`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Start options of a scripted server.

    Attributes:
        eos_ids: end every request that does not set `ignore_eos`, as the model's own do.
        incremental: stream chunks hold what is new, not all so far (--incremental-streaming-output).
        interval: tokens that come at a time, and so a chunk.
        tokenizer: a tokenizer.json: with it there is text, and stop strings stop.
        log: requests to remember, with their answers.
        late_abort_s: so long after a stream's end the real server aborts whatever has its id by then.
        weights: keep checksums of the weights at `model_path`, as held in this torch type (`float32`); empty:
            keep none.
        preferred: what /model_info says of --preferred-sampling-params; it changes no answer.
    """

    model_path: str = "scripted"
    weight_version: str = "default"
    eos_ids: frozenset[int] = frozenset()
    incremental: bool = False
    interval: int = 1
    images: bool = False
    tokenizer: Path | None = None
    log: int = 0
    late_abort_s: float = 2.0
    weights: str = ""
    preferred: Any = None


class Failed(Exception):
    """Raised where the script lets this request fail."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, eq=False)
class Job:
    """A running request: `made` of the draft's ids have come, `spans` say under which weights.

    `held` while it waits, not begun, for a pause to end; `finish` is set when nothing more will come.
    """

    rid: str
    prompt_tokens: int
    draft: Draft
    body: dict[str, Any]
    held: bool
    made: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    abort_message: str | None = None
    retractions: int = 0
    streaming: bool = False
    begun: float = field(default_factory=time.perf_counter)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stream(self) -> bool:
        """Whether the client wants the tokens as they come."""
        return bool(self.body.get("stream"))

    @property
    def slow(self) -> bool:
        """Whether its tokens take time: only then can anything happen between them."""
        return bool(self.draft.answer.first_s or self.draft.answer.token_s)

    @property
    def total(self) -> int:
        """How many tokens may come: all of them, or those before it fails."""
        failure = self.draft.answer.failure
        return len(self.draft.ids) if failure is None else min(failure.after, len(self.draft.ids))

    def emit(self, end: int, version: str) -> None:
        """The tokens up to `end` have come, under these weights."""
        if end <= self.made:
            return
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = end
        else:
            self.spans.append({"version": version, "start": self.made, "end": end})
        self.made = end

    def settle(self) -> None:
        """Set `finish` if it has ended."""
        if self.made == len(self.draft.ids):
            self.finish = self.draft.finish
        elif self.abort_message is not None:
            message = self.abort_message
            self.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}

    def abort(self) -> None:
        """End it with the tokens so far. A held one ignores this, as in the real server."""
        if not self.held:
            self.abort_message = "Aborted"
            self.wake.set()

    async def woken(self) -> None:
        """Wait for an abort or the end of a pause."""
        self.wake.clear()
        await self.wake.wait()

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless it is aborted."""
        deadline = time.perf_counter() + seconds
        while self.abort_message is None and (left := deadline - time.perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.woken()


VOCABULARY = 151_936
LENGTH = 32


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a request after `after` tokens.

    `error` is an HTTP 500 (in a stream that has begun, an error in its data); `drop` ends the connection;
    `refuse` is an HTTP 400.
    """

    after: int = 0
    kind: Literal["error", "drop", "refuse"] = "error"
    message: str = "the script says so"


@dataclass(frozen=True, slots=True)
class Answer:
    """The ids sampled for one prompt, before limits cut them.

    Attributes:
        logprobs: one for each id; None: made of the ids.
        first_s, token_s: seconds before the first token, and before each that follows.
        versions: (tokens, weight version) in rising order: new weights come after that many tokens, for
            all requests.
        cached_tokens: of the prompt, as reported.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    first_s: float = 0.0
    token_s: float = 0.0
    versions: tuple[tuple[int, str], ...] = ()
    cached_tokens: int = 0
    failure: Failure | None = None


Script = Callable[[list[int], Mapping[str, Any]], Answer]
"""(input ids, sampling params) -> what to answer."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer as it would end undisturbed: every id with its logprob, and the finish reason."""

    answer: Answer
    ids: list[int]
    logprobs: list[float]
    finish: dict[str, Any]


def draft(answer: Answer, params: Mapping[str, Any], eos_ids: frozenset[int], decode: Decode | None) -> Draft:
    """Where sampling ends: a stop string takes precedence over a stop id, and that over the length.

    The ids keep what ended them, as SGLang's do. A script with no more ids has stopped at its
    last one.
    """
    limit = params.get("max_new_tokens")
    ids = list(answer.ids[: 128 if limit is None else limit])
    finish: dict[str, Any] = {"type": "length", "length": len(ids)}
    if len(ids) == len(answer.ids) and ids:
        finish = {"type": "stop", "matched": ids[-1]}
    stops = frozenset() if params.get("ignore_eos") else eos_ids | set(params.get("stop_token_ids") or ())
    for place, token in enumerate(ids):
        if token in stops:
            ids, finish = ids[: place + 1], {"type": "stop", "matched": token}
            break
    ids, finish = _stopped_by_text(ids, finish, params.get("stop"), decode)
    logprobs = logprobs_of(ids) if answer.logprobs is None else list(answer.logprobs[: len(ids)])
    return Draft(answer, ids, logprobs, finish)


def _stopped_by_text(
    ids: list[int], finish: dict[str, Any], stop: Any, decode: Decode | None
) -> tuple[list[int], dict[str, Any]]:
    wanted = [stop] if isinstance(stop, str) else list(stop or ())
    if not wanted or decode is None:
        return ids, finish
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        for stop_string in wanted:
            if stop_string in text:
                return ids[:count], {"type": "stop", "matched": stop_string}
    return ids, finish


def logprobs_of(ids: Sequence[int]) -> list[float]:
    """Invented logprobs, float32: equal for equal ids at equal positions."""
    places = np.arange(1, len(ids) + 1, dtype=np.uint32)
    mixed = (np.array(ids, np.uint32) ^ (places * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA6B)
    logprobs: list[float] = (-3.0 * (mixed.astype(np.float32) / np.float32(2**32))).tolist()
    return logprobs


# Scripts ----------------------------------------------------------------------------------------


def hashed(length: int = LENGTH, vocabulary: int = VOCABULARY, stop_id: int | None = None) -> Script:
    """Ids that depend on the prompt alone, `length` of them with the stop id, where there is one."""

    def script(input_ids: list[int], params: Mapping[str, Any]) -> Answer:
        seed = xxhash.xxh3_64_intdigest(np.array(input_ids, np.int64).tobytes())
        count = length - (stop_id is not None)
        ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
        return Answer([i for i in ids if i != stop_id] + ([] if stop_id is None else [stop_id]))

    return script


def in_turn(answers: Sequence[Answer | Sequence[int]]) -> Script:
    """These answers or ids, request by request in the order in which they come; then again from the first."""
    ready = [answer if isinstance(answer, Answer) else Answer(answer) for answer in answers]
    requests = 0

    def script(input_ids: list[int], params: Mapping[str, Any]) -> Answer:
        nonlocal requests
        requests += 1
        return ready[(requests - 1) % len(ready)]

    return script
