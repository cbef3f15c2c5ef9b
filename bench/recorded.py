"""Compares the proxy's recording with the scripted engine's replies; and times its commits."""

from __future__ import annotations

import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from rollbook import store
from rollbook.bench.proxy_outcome import Recorded
from rollbook.bench.scripted.dialogues import by_mark
from rollbook.bench.turns import RUN
from rollbook.store import Event
from rollbook.store.events import TurnCompleted, TurnRequested

WAIT_S = 30.0


def check(folder: Path, replies: Path, expected: int) -> Recorded:
    """Compare each completed turn's ids, logprobs and spans with the script's answer to its own prompt."""
    script = by_mark(replies)
    turns = wrong = 0
    for event in store.open(folder).events():
        turn = event.record
        if isinstance(turn, TurnCompleted):
            turns += 1
            expected_answer = script(turn.prompt_ids.tolist(), {})
            same = turn.completion_ids.tolist() == list(expected_answer.ids)
            same = same and turn.logprobs is not None
            same = same and np.array_equal(turn.logprobs, np.array(expected_answer.logprobs, np.float32))  # type: ignore[arg-type]
            covered = [(s.start, s.end) for s in turn.version_spans] == [(0, len(expected_answer.ids))]
            wrong += not (same and covered)
    return Recorded(turns, wrong + abs(expected - turns))


class Commits:
    """Recorded turns, appended again to a store of their own, in the way the proxy appends them."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self._turns: list[tuple[TurnRequested, TurnCompleted]] = []
        pending: dict[str, TurnRequested] = {}
        for event in store.open(folder).events():
            record = event.record
            if isinstance(record, TurnRequested):
                pending[record.turn_id] = record
            elif isinstance(record, TurnCompleted):
                self._turns.append((pending.pop(record.turn_id), record))
        self._writer = store.open(copy, create=True).writer("commits")

    def take(self, count: int) -> list[float]:
        """Milliseconds until a turn is durable, one after the other: its request is not waited for."""
        times_ms: list[float] = []
        for requested, completed in islice(cycle(self._turns), count):
            begun = time.perf_counter()
            self._writer.append([Event(requested, RUN)])
            self._writer.append([Event(completed, RUN)]).result(WAIT_S)
            times_ms.append(1e3 * (time.perf_counter() - begun))
        return times_ms

    def close(self) -> None:
        """Close the store."""
        self._writer.close()
