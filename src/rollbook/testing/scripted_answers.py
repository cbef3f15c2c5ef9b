"""The answers of a scripted SGLang: a script's ids, cut where the real one would stop. Pure.

The server that says it is `testing.scripted_sglang`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

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
    """Where sampling ends: a stop string comes before a stop id, and that before the length.

    The ids keep what ended them, as SGLang's do. A script that says no more has stopped at its last id.
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
        for one in wanted:
            if one in text:
                return ids[:count], {"type": "stop", "matched": one}
    return ids, finish


def logprobs_of(ids: Sequence[int]) -> list[float]:
    """Invented logprobs, float32: equal for equal ids at equal positions."""
    places = np.arange(1, len(ids) + 1, dtype=np.uint32)
    mixed = (np.array(ids, np.uint32) ^ (places * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA6B)
    made: list[float] = (-3.0 * (mixed.astype(np.float32) / np.float32(2**32))).tolist()
    return made


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
    ready = [one if isinstance(one, Answer) else Answer(one) for one in answers]
    asked = 0

    def script(input_ids: list[int], params: Mapping[str, Any]) -> Answer:
        nonlocal asked
        asked += 1
        return ready[(asked - 1) % len(ready)]

    return script
