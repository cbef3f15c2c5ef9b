"""`stream.*`: the trainer's stream out of the fresh log, against JSONL read as peers do and against memcpy.

The log holds completed turns of ten policy versions, mixed; a staleness filter keeps those that are fresh
enough. Each side makes batches of 64 turns: token ids, logprobs and loss mask, flat. The JSONL file holds the
same events, and its reader is the usual loop: `json.loads` a line, filter, convert. memcpy copies the very
bytes that the stream hands out from one place in memory to another. That all batches are alike is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.rounds import Laps, Limit, always, interleave, times_faster, walls
from rollbook.bench.sinks import ACK_TIMEOUT_S, in_envelopes
from rollbook.bench.turns import make_turn
from rollbook.store import Store
from rollbook.store.events.codec import as_json
from rollbook.store.log.stream import packed

STREAM, JSONL, MEMCPY = "stream", "jsonl", "memcpy"
VERSIONS, FRESH = 10, 2
"""Versions in the log, and the oldest that is fresh enough."""
COMMIT = 40
Batch = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(10, 30.0))
    turns: int = 3000
    batch: int = 64

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds


@dataclass(frozen=True, slots=True)
class Measured:
    """The laps, and how much was streamed in each."""

    laps: Laps
    tokens: int
    bytes: int


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Write the log and the file into `folder`, and stream them in turns.

    Raises:
        AssertionError: the sides do not hand out the same batches.
    """
    log = _write(folder, plan)
    ours = [(b.ids, b.logprobs, b.loss_mask) for b in packed(log, min_version=FRESH, turns=plan.batch)]
    for a, b in zip(ours, read_jsonl(folder / "events.jsonl", plan.batch), strict=True):
        assert _same(a, b), "the stream and the file's reader hand out different batches"
    tokens = sum(len(ids) for ids, _, _ in ours)
    source = np.concatenate([array.view(np.uint8) for batch in ours for array in batch])
    target = np.empty_like(source)
    sides = {
        STREAM: always(lambda: _exhaust(packed(log, min_version=FRESH, turns=plan.batch))),
        JSONL: always(lambda: _exhaust(read_jsonl(folder / "events.jsonl", plan.batch))),
        MEMCPY: always(lambda: np.copyto(target, source)),
    }
    laps = interleave(sides, plan.limit, on_round)
    return Measured(laps, tokens, source.nbytes)


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def _exhaust(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


def _write(folder: Path, plan: Plan) -> Store:
    """The same events as a log and as a file of JSON lines."""
    rng = np.random.default_rng(0)
    log = store.open(folder / "store", create=True)
    with log.writer("serve") as writer, (folder / "events.jsonl").open("wb") as file:
        for first in range(0, plan.turns, COMMIT):
            count = min(COMMIT, plan.turns - first)
            events = in_envelopes([make_turn(rng, int(rng.integers(VERSIONS))) for _ in range(count)])
            writer.append(events).result(ACK_TIMEOUT_S)
            for event in events:
                file.write(orjson.dumps(as_json(event), option=orjson.OPT_APPEND_NEWLINE))
    return log


def read_jsonl(path: Path, turns: int) -> Iterator[Batch]:
    """Batches of fresh turns out of a file of JSON lines, as peers' loaders make them."""
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    count = 0
    with path.open() as file:
        for line in file:
            event = json.loads(line)
            if event["policy_version"] < FRESH:
                continue
            prompt, completion = event["prompt_ids"], event["completion_ids"]
            ids += prompt + completion
            logprobs += [0.0] * len(prompt) + event["logprobs"]
            mask += [0] * len(prompt) + [1] * len(completion)
            count += 1
            if count == turns:
                yield np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(mask, np.uint8)
                ids, logprobs, mask, count = [], [], [], 0
    if count:
        yield np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(mask, np.uint8)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    rates = {side: [measured.tokens / s for s in walls(laps)] for side, laps in measured.laps.items()}
    value, runs = median(rates[STREAM]), len(rates[STREAM])
    size = f"{measured.bytes / measured.tokens:.0f} B/token"
    against = {
        "stream.vs_jsonl": (JSONL, "JSONL read with json.loads"),
        "stream.vs_memcpy": (MEMCPY, f"memcpy of the same bytes ({measured.bytes >> 20} MiB, {size})"),
    }
    figures = tuple(
        Figure(
            *(name, value, "tokens/s", f"{what}: {median(rates[side]):.3g} tokens/s"),
            *(times_faster(walls(measured.laps[STREAM]), walls(measured.laps[side])), runs),
        )
        for name, (side, what) in against.items()
    )
    return Outcome(figures, tuple(spread(side, "tokens/s", found) for side, found in rates.items()))
