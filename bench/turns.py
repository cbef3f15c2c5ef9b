"""The payload of the log's benchmarks: completed turns of about 14 KB. Pure, but for random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from rollbook.store.events import Json, TurnCompleted, VersionSpan
from rollbook.store.ids import new_id

RUN = "bench"
PROMPT_IDS, COMPLETION_IDS, VOCABULARY = 1_100, 525, 151_936
TEXT_CHARACTERS = 4_600
"""Of the reply; with the ids, the logprobs and the rest of the record an event is about 14 KB."""


def make_turn(rng: np.random.Generator, version: int = 7) -> TurnCompleted:
    """A completed turn of a realistic size; ids follow Zipf's law over a 151,936-token vocabulary."""
    words = rng.integers(97, 123, TEXT_CHARACTERS, dtype=np.uint8)
    words[rng.integers(0, TEXT_CHARACTERS, TEXT_CHARACTERS // 6)] = 32
    return TurnCompleted(
        trajectory_id=new_id(),
        turn_id=new_id(),
        policy="actor",
        policy_version=version,
        prompt_ids=(rng.zipf(1.2, PROMPT_IDS) % VOCABULARY).astype(np.int32),
        completion_ids=(rng.zipf(1.2, COMPLETION_IDS) % VOCABULARY).astype(np.int32),
        logprobs=-rng.exponential(0.5, COMPLETION_IDS).astype(np.float32),
        version_spans=(VersionSpan("actor", version, 0, COMPLETION_IDS),),
        prompt_length=PROMPT_IDS,
        prompt_sha256="0" * 64,
        finish_reason="stop",
        reply={"role": "assistant", "content": words.tobytes().decode()},
        logprob_semantics={"kind": "sampled", "of": "softmax(logits / temperature)", "temperature": 1.0},
        flags=[],
        timings={"held_us": 0, "engine_us": 1_000_000},
    )


def make_turns(count: int, seed: int = 0) -> list[TurnCompleted]:
    """Different turns; the same seed gives the same ones, except for their ids."""
    rng = np.random.default_rng(seed)
    return [make_turn(rng) for _ in range(count)]


def bare_bytes(turns: Sequence[TurnCompleted]) -> float:
    """Bytes of a turn's bare values, on average: its arrays, and the rest of its record as JSON."""
    sizes = []
    for turn in turns:
        rest: Json = {"reply": turn.reply, "semantics": turn.logprob_semantics, "timings": turn.timings}
        logprobs = 0 if turn.logprobs is None else turn.logprobs.nbytes
        sizes.append(turn.prompt_ids.nbytes + turn.completion_ids.nbytes + logprobs + len(orjson.dumps(rest)))
    return sum(sizes) / len(sizes)
