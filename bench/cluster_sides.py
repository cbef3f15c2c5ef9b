"""A process of one host of the benchmark: it writes a lane, watches those of others, or catches up with them.

`python -m rollbook.bench.cluster_sides FOLDER`, with commands on stdin, a JSON object a line.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollbook import store
from rollbook.bench.open_loop import Traffic, arrivals
from rollbook.bench.processes import obey
from rollbook.bench.sinks import ACK_TIMEOUT_S, in_envelopes
from rollbook.bench.tied import end_with_parent
from rollbook.bench.turns import make_turns
from rollbook.store.ids import now_us
from rollbook.store.wal.files import lane_folder, read_watermark

TURNS, PATIENCE_S, POLL_S = 160, 60.0, 0.005


class Side:
    """The process's store, and its lane."""

    def __init__(self, folder: Path) -> None:
        self.log = store.open(folder)
        self._payload = make_turns(TURNS)
        self._writer: Any = None

    @property
    def writer(self) -> Any:
        """Of its lane, which it takes when it first writes."""
        if self._writer is None:
            self._writer = self.log.writer("bench")
        return self._writer

    def do(self, command: dict[str, Any]) -> Any:
        """Obey."""
        return getattr(self, command.pop("do"))(**command)

    def acknowledged(self, count: int) -> list[float]:
        """Append events, each once the one before is acknowledged; milliseconds of each."""
        took = []
        for i in range(count):
            events = in_envelopes([self._payload[i % TURNS]])
            begun = time.perf_counter()
            self.writer.append(events).result(ACK_TIMEOUT_S)
            took.append(1e3 * (time.perf_counter() - begun))
        return took

    def stream(self, rate: float, seconds: float, seed: int) -> int:
        """Append events when they are due; how many."""
        due = arrivals(Traffic(rate, seconds), seed)
        gc.collect()
        pending: deque[Future[int]] = deque()
        begun = time.perf_counter()
        for i, offset in enumerate(due):
            if (wait := begun + offset - time.perf_counter()) > 0:
                time.sleep(wait)
            pending.append(self.writer.append(in_envelopes([self._payload[i % TURNS]])))
        for future in pending:
            future.result(ACK_TIMEOUT_S)
        return len(due)

    def fill(self, megabytes: int) -> int:
        """Append so much, and wait until the medium has it; bytes of the lane."""
        while self._written() < megabytes << 20:
            self.writer.append(in_envelopes(self._payload)).result(ACK_TIMEOUT_S)
        head, until = self.log.head()[self.writer.lane], time.monotonic() + PATIENCE_S
        while self.writer._shipment.shipped < head:
            if time.monotonic() > until:
                raise TimeoutError("the medium did not take it")
            time.sleep(0.01)
        return self._written()

    def _written(self) -> int:
        """Bytes of the lane: of its closed segments, and of the last one as far as it is written."""
        folder = lane_folder(self.log.path, self.writer.lane)
        mark = read_watermark(folder)
        closed = [file for file in folder.glob("*.wal") if int(file.stem) < mark.segment]
        return mark.offset + sum(file.stat().st_size for file in closed)

    def watch(self, seconds: float) -> list[float]:
        """Milliseconds from when events of others were made until they are seen here."""
        visible: list[float] = []
        until, begun_us = time.monotonic() + seconds, now_us()
        with self.log.tail(self.log.head()) as tail:
            while time.monotonic() < until:
                time.sleep(POLL_S)
                events, now = tail.poll(), now_us()
                visible += [(now - e.time_us) / 1e3 for e in events if e.time_us >= begun_us]
        return visible


def main() -> None:
    """Obey until stdin ends."""
    end_with_parent()
    side = Side(Path(sys.argv[1]))
    obey(side.do)


if __name__ == "__main__":
    main()
