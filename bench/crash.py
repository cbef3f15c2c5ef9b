"""The process that the recover benchmark kills: it appends, rolls, seals, merges and notes all at
once."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from rollbook import store
from rollbook.bench.sinks import ACK_TIMEOUT_S
from rollbook.bench.turns import RUN
from rollbook.store import Event, Store
from rollbook.store.events import (
    RewardAssigned,
    TrajectoryFinished,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
    VersionSpan,
)
from rollbook.store.ids import new_id
from rollbook.store.upkeep.sealer import Sealer

LANE = "crash"
PHASES = ("between passes", "sealing", "merging", "deriving", "catalog and removal")
ID_BYTES, PRINT_BYTES = 36, 16
IN_FLIGHT = 3
PACE_S = 0.002
"""Between two appends, on average: with no pause the sealer would never be done with what there is."""
LARGE = 50_000
"""Tokens of a turn now and then: half a megabyte, which a kill can cut in the middle of its write."""
SETTINGS = """\
[append]
segment_bytes = 65536
body_bytes = 2048
[seal]
keep_wal_bytes = 1048576
compact_bytes = 8388608
row_group = 64
"""
"""Tiny segments and units, so that a life of a fraction of a second sees all of it many times."""


def fingerprint(event: Event) -> bytes:
    """16 bytes over an event's whole content; made without the code that stores events."""
    state = xxhash.xxh3_128(repr((event.event_id, event.kind, event.run, event.time_us)).encode())
    for field in fields(event.record):
        value = getattr(event.record, field.name)
        if isinstance(value, np.ndarray):
            state.update(f"{field.name} {value.dtype.str} {value.shape}".encode())
            state.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, tuple):
            spans = [(s.policy, s.version, s.start, s.end) for s in value]
            state.update(repr((field.name, spans)).encode())
        else:
            state.update(field.name.encode() + orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
    return state.digest()


def in_phase(note: Path) -> str:
    """What the process of this note was last doing, besides appending."""
    return PHASES[note.read_bytes()[0]]


def work(folder: Path, seed: int, acks: Connection, note: Path) -> None:
    """Append to the lane and seal it until killed.

    Each acknowledged append is reported through `acks`: id and fingerprint of each of its
    events. An empty message announces the first append; one that begins with `!` describes
    damage.

    Args:
        note: a file whose first byte always holds the number of the sealer's phase.
    """
    rng = random.Random(seed)
    log = store.open(folder)
    with note.open("r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    with log.writer(LANE) as writer:
        acks.send_bytes(b"")
        threading.Thread(target=_seal, args=(log, phase, acks), daemon=True).start()
        waiting: deque[tuple[Future[int], bytes]] = deque()
        for events in _appends(rng):
            prints = b"".join(event.event_id.encode() + fingerprint(event) for event in events)
            time.sleep(rng.expovariate(1 / PACE_S))
            waiting.append((writer.append(events), prints))
            if len(waiting) == IN_FLIGHT:
                future, prints = waiting.popleft()
                future.result(ACK_TIMEOUT_S)
                acks.send_bytes(prints)


def _seal(log: Store, phase: mmap.mmap, acks: Connection) -> None:
    def on_step(_: str, step: str) -> None:
        named = {p.split()[0]: p for p in PHASES} | {"telling": "catalog and removal"}
        phase[0] = PHASES.index(named[step.split()[0]])

    sealer = Sealer(log, on_step=on_step)
    while True:
        report = sealer.run_once()
        phase[0] = 0
        if report.damage:
            acks.send_bytes(f"!{report.damage}".encode()[: mmap.PAGESIZE // 2])
            os._exit(1)


def _appends(rng: random.Random) -> Iterator[list[Event]]:
    """Groups of events without end: turns with their requests, some of whose texts are stored as bodies."""
    text = "".join(rng.choices("abcdefgh \n", k=4000))
    while True:
        trajectory_id = new_id()
        records: list[Any] = []
        for _ in range(rng.randint(1, 3)):
            turn_id, size = new_id(), rng.randint(1, 200) if rng.random() < 0.98 else LARGE
            system = {"role": "system", "content": text[: rng.choice((20, 3000))]}
            ids = np.frombuffer(rng.randbytes(2 * size), np.uint16).astype(np.int32)
            logprobs = -np.frombuffer(rng.randbytes(2 * size), np.uint16).astype(np.float32) / np.float32(
                7000
            )
            records += [
                TurnRequested(
                    *(trajectory_id, turn_id, new_id(), None, "first", None, 0, [system], {"n": 1}, "m"),
                    *({}, {}, "key"),
                ),
                TurnCompleted(
                    *(trajectory_id, turn_id, "actor", 1, ids[: size // 2], ids, logprobs),
                    *((VersionSpan("actor", 1, 0, size),), size // 2, "0" * 64, "stop"),
                    *({"role": "assistant", "content": text[:size]}, {}, [], {"total_us": size}),
                ),
                TurnDelivered(trajectory_id, turn_id, "sent"),
            ]
        records += [RewardAssigned(trajectory_id, None, rng.random()), TrajectoryFinished(trajectory_id)]
        yield [Event(record, RUN) for record in records[: rng.randint(1, len(records))]]
