"""The durable ends of all lanes at one instant: what makes `head` a closed cut.

An event may name one of another lane that was durable before it: a parent, the adopted part of a
trajectory, a superseded reward. Reading one watermark after the other could see the later event and not
the earlier one. So all are read, again and again, until two passes agree: watermarks only grow, hence
every lane stood where it stands in the instant between the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container
from pathlib import Path

from rollbook.store.cut import Cut
from rollbook.store.errors import StoreError
from rollbook.store.inside import open_plain
from rollbook.store.wal.files import (
    WATERMARK_BYTES,
    folders_of_lanes,
    read_watermark,
    segment_numbers,
    unpack_watermark,
)

PASSES = 10_000
"""A pass takes about 2 us a lane, so this gives up after well over a second of changes in every pass."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 0.001, 0.02


def closed_head(store: Path) -> dict[str, int]:
    """Lane -> its durable events, all at one instant; lanes without events are left out.

    Raises:
        CorruptionError: a lane's watermark is missing or unreadable.
        StoreError: the lanes grew during each of `PASSES` passes.
    """
    marks = _OpenMarks(store / "lanes")
    try:
        before = marks.read()
        for _ in range(PASSES):
            now = marks.read()
            if now == before:
                return now
            before = now
    finally:
        marks.close()
    raise StoreError(
        f"{store}: its {len(before)} lanes grow faster than their watermarks can be read together: "
        "write fewer lanes, or raise append.linger_ms in store.toml"
    )


def without(head: Cut, lanes: Container[str]) -> dict[str, int]:
    """The head without some lanes."""
    return {lane: count for lane, count in head.items() if lane not in lanes}


def wait_for_growth(store: Path, head: Cut, timeout_s: float, skip: Container[str] = ()) -> dict[str, int]:
    """The head but for the lanes in `skip`, once it differs from `head` or `timeout_s` seconds have passed.

    Looks at the watermarks every 1 to 20 ms, which costs about 1 % of a core.
    """
    deadline = time.monotonic() + timeout_s
    pause = FIRST_SLEEP_S
    while True:
        now = without(closed_head(store), skip)
        left = deadline - time.monotonic()
        if now != head or left <= 0:
            return now
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_SLEEP_S)


class _OpenMarks:
    """The watermark files of a store, each opened once."""

    def __init__(self, lanes: Path) -> None:
        self._lanes = lanes
        self._fds: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """One pass over all of them. Lanes that were made since the last pass count."""
        counts: dict[str, int] = {}
        for lane in folders_of_lanes(self._lanes.parent):
            if lane not in self._fds and not self._open(lane):
                continue
            mark = unpack_watermark(os.pread(self._fds[lane], WATERMARK_BYTES + 1, 0))
            if mark is None:  # not written yet, half overwritten or damaged: this reads it again
                mark = read_watermark(self._lanes / lane)
            if mark.next_seq:
                counts[lane] = mark.next_seq
        return counts

    def _open(self, lane: str) -> bool:
        try:
            self._fds[lane] = open_plain(f"{self._lanes}/{lane}/WATERMARK", os.O_RDONLY)
        except NotADirectoryError:
            return False
        except FileNotFoundError:
            if segment_numbers(self._lanes / lane):
                read_watermark(self._lanes / lane)  # raises an error that names the missing file
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
