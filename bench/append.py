"""`append.vs_raw`: durable appends through the lane writer against plain writes of the same bytes.

Each commit is 40 events of about 14 KB. One side appends them and waits for the acknowledgement; the
other gives the very bytes of such a frame to `os.write` and `os.fdatasync`. The two take turns, commit
by commit, in one run on one disk, so that a noisy neighbour hits both. Making the events and the raw
side's bytes is not timed; encoding, checksums, hand-over to the writer thread and watermark are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.store import Event
from rollbook.store.codec import encode
from rollbook.store.events import Json, TurnCompleted, VersionSpan
from rollbook.store.ids import new_id
from rollbook.store.lane.files import lane_folder, segment_numbers, segment_path
from rollbook.store.lane.frame import BATCH_FRAME, EMPTY_CHAIN, encode_frame, read_frame
from rollbook.store.lane.writer import LaneWriter

LANE = "bench"
PROMPT_IDS, COMPLETION_IDS, VOCABULARY = 1_100, 525, 151_936
TEXT_CHARACTERS = 4_600
"""Of the reply; with the ids, the logprobs and the rest of the record an event is about 14 KB."""
ACK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: stops at `rounds`, or after `limit_s` seconds if that comes first."""

    rounds: int = 60
    commits: int = 5
    """Commits of each side in a round."""
    events: int = 40
    """Events in a commit."""
    limit_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of every commit, round by round, and the bytes that each side wrote."""

    plan: Plan
    log_s: tuple[tuple[float, ...], ...]
    raw_s: tuple[tuple[float, ...], ...]
    log_bytes: int
    raw_bytes: int
    commits_written: int
    values_per_event: float
    """Bytes of an event's bare values: its arrays, and the rest of its record as JSON."""


def make_turn(rng: np.random.Generator) -> TurnCompleted:
    """A completed turn of a realistic size; ids follow Zipf's law over a 151,936-token vocabulary."""
    words = rng.integers(97, 123, TEXT_CHARACTERS, dtype=np.uint8)
    words[rng.integers(0, TEXT_CHARACTERS, TEXT_CHARACTERS // 6)] = 32
    return TurnCompleted(
        trajectory_id=new_id(),
        turn_id=new_id(),
        policy="actor",
        policy_version=7,
        prompt_ids=(rng.zipf(1.2, PROMPT_IDS) % VOCABULARY).astype(np.int32),
        completion_ids=(rng.zipf(1.2, COMPLETION_IDS) % VOCABULARY).astype(np.int32),
        logprobs=-rng.exponential(0.5, COMPLETION_IDS).astype(np.float32),
        version_spans=(VersionSpan("actor", 7, 0, COMPLETION_IDS),),
        prompt_length=PROMPT_IDS,
        prompt_sha256="0" * 64,
        finish_reason="stop",
        reply={"role": "assistant", "content": words.tobytes().decode()},
        logprob_semantics={"kind": "sampled", "of": "softmax(logits / temperature)", "temperature": 1.0},
        flags=[],
        timings={"held_us": 0, "engine_us": 1_000_000},
    )


def _groups(plan: Plan) -> Iterator[list[Event]]:
    """Groups of events without end: other ids each time, over a fixed set of records."""
    rng = np.random.default_rng(0)
    records = [make_turn(rng) for _ in range(plan.events * 4)]
    start = 0
    while True:
        yield [Event(records[(start + i) % len(records)], "bench") for i in range(plan.events)]
        start += plan.events


def _frame_bytes(events: list[Event]) -> bytes:
    """The group as one frame: as many bytes as the lane writer writes for it."""
    payload = encode(events, 0).serialize()
    buffers, _ = encode_frame(BATCH_FRAME, payload, 0, len(events), EMPTY_CHAIN)
    return b"".join(bytes(buffer) for buffer in buffers)


def _append(writer: LaneWriter, events: list[Event]) -> float:
    begun = time.perf_counter()
    writer.append(events).result(ACK_TIMEOUT_S)
    return time.perf_counter() - begun


def _write(fd: int, data: bytes) -> float:
    begun = time.perf_counter()
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fdatasync(fd)
    return time.perf_counter() - begun


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Write both sides into `folder`, taking turns. Calls `on_round` after each round.

    Raises:
        WriteFailedError, OSError: the disk refuses, for instance because it is full.
    """
    log = store.open(folder / "store", create=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    fd = os.open(folder / "raw", flags, 0o644)
    log_s: list[tuple[float, ...]] = []
    raw_s: list[tuple[float, ...]] = []
    try:
        with log.writer(LANE) as writer:
            groups = _groups(plan)
            _round(writer, fd, groups, plan, log_first=True)  # warm-up: not measured
            deadline = time.monotonic() + plan.limit_s
            while len(log_s) < plan.rounds and (not log_s or time.monotonic() < deadline):
                # Who goes first alternates: the second one of a pair finds the disk busier.
                ours, theirs = _round(writer, fd, groups, plan, log_first=len(log_s) % 2 == 0)
                log_s.append(ours)
                raw_s.append(theirs)
                on_round()
        raw_bytes = os.fstat(fd).st_size
    finally:
        os.close(fd)
    return Measured(
        plan,
        tuple(log_s),
        tuple(raw_s),
        _batch_bytes(lane_folder(log.path, LANE)),
        raw_bytes,
        (len(log_s) + 1) * plan.commits,
        _values_bytes(next(groups)),
    )


def _round(
    writer: LaneWriter, fd: int, groups: Iterator[list[Event]], plan: Plan, *, log_first: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each commit: (through the log, raw)."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(plan.commits):
        events = next(groups)
        data = _frame_bytes(events)
        if log_first:
            ours.append(_append(writer, events))
        theirs.append(_write(fd, data))
        if not log_first:
            ours.append(_append(writer, events))
    return tuple(ours), tuple(theirs)


def _batch_bytes(folder: Path) -> int:
    """Bytes of the lane's batch frames: its segments without the header frame of each."""
    total = 0
    for number in segment_numbers(folder):
        data = segment_path(folder, number).read_bytes()
        total += len(data) - read_frame(memoryview(data), 0).end
    return total


def _values_bytes(events: list[Event]) -> float:
    sizes = []
    for event in events:
        record = event.record
        assert isinstance(record, TurnCompleted)
        assert record.logprobs is not None
        rest: Json = {"reply": record.reply, "semantics": record.logprob_semantics, "timings": record.timings}
        arrays = record.prompt_ids.nbytes + record.completion_ids.nbytes + record.logprobs.nbytes
        sizes.append(arrays + len(orjson.dumps(rest)))
    return sum(sizes) / len(sizes)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    events = measured.plan.commits * measured.plan.events
    ours = [events / sum(seconds) for seconds in measured.log_s]
    theirs = [events / sum(seconds) for seconds in measured.raw_s]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    acks = sorted(1e3 * s for seconds in measured.log_s for s in seconds)
    plain = sorted(1e3 * s for seconds in measured.raw_s for s in seconds)
    size = measured.log_bytes / (measured.commits_written * measured.plan.events)
    runs = len(ours)
    same = "os.write + fdatasync of the same bytes"
    figures = (
        Figure(
            *("append.vs_raw", median(ours), "events/s"),
            *(f"{same}: {median(theirs):.0f} events/s", median(ratios), runs),
        ),
        *(
            Figure(
                f"append.ack_ms.p{q}",
                _quantile(acks, q),
                "ms",
                f"{same}: {_quantile(plain, q):.2f} ms",
                None,
                runs,
            )
            for q in (50, 99)
        ),
        Figure(
            *("append.bytes_per_event", size, "bytes"),
            *(f"bare values: {measured.values_per_event:.0f} bytes", None, runs),
        ),
    )
    return Outcome(
        figures,
        (
            spread("durable appends", "events/s", ours),
            spread(same, "events/s", theirs),
            spread("ratio of a round", "", ratios),
            spread("acknowledgement of a commit", "ms", acks),
            spread("raw commit", "ms", plain),
        ),
    )


def _quantile(ordered: list[float], percent: int) -> float:
    """The smallest value that `percent` % of the ordered values do not exceed."""
    return ordered[max(-(-percent * len(ordered) // 100) - 1, 0)]
