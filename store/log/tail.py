"""The tail: each event of the store handed out once, as it becomes durable, from any cut on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut, check_held
from rollbook.store.events import Event, codec
from rollbook.store.log.reader import LaneReader
from rollbook.store.wal.files import FENCED, closed_head, lane_folder, wait_for_growth, without_lanes


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are handed out; the others are passed over.

    Attributes:
        kinds: these kinds only, if given.
        without: not these kinds.
        run: events of this run only, if given.
        skip_lanes: lanes that are not read at all.
    """

    kinds: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    run: str | None = None
    skip_lanes: frozenset[str] = frozenset()

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch's rows that are handed out."""
        for column, values, keep in (
            ("kind", self.kinds, True),
            ("kind", self.without or None, False),
            ("run", None if self.run is None else {self.run}, True),
        ):
            if values is not None:
                mask = pc.is_in(batch.column(column), pa.array(sorted(values), pa.string()))
                batch = batch.filter(mask if keep else pc.invert(mask))
        return batch


EVERYTHING = Filter()


def held_of(store: Path, cut: Cut) -> dict[str, int]:
    """What the store holds of a cut that was read here. A lane that another host has ended since may hold
    fewer events than were read: the others are orphans.

    Raises:
        CutError: the cut holds more of another lane than the store.
    """
    head = closed_head(store)
    check_held(cut, head, lambda lane: (lane_folder(store, lane) / FENCED).exists())
    held = {lane: min(count, head.get(lane, 0)) for lane, count in cut.items()}
    return {lane: count for lane, count in held.items() if count}


class Tail(AbstractContextManager["Tail"]):
    """Hands out each event of the store once, as it becomes durable.

    It proceeds in rounds: a round is the events between two heads, lane by lane, each lane in
    order. `cut()` is closed only between rounds. Before `start` it reads nothing but the headers
    of the segments (or the sealed units) in which `start` ends.

    Args:
        store: folder of the store.
        start: hand out nothing that this cut holds.
        wanted: which events to hand out.

    Raises:
        CutError: `start` holds more than the store, of a lane that was not ended by another host.
    """

    def __init__(self, store: Path, start: Cut, wanted: Filter = EVERYTHING) -> None:
        self._store, self._wanted = store, wanted
        self._cut = held_of(store, start)
        self._readers: dict[str, LaneReader] = {}
        self._round: Iterator[tuple[LaneReader, pa.RecordBatch]] | None = None
        self.until: Cut | None = None
        """Where to stop, if not at the head; set it between rounds."""

    def poll(self, limit: int | None = None) -> list[Event]:
        """Events that became durable since the last poll: lane by lane, each in order.

        Args:
            limit: stop after the batch with the limit-th event; the next poll goes on in the same round.

        Raises:
            CorruptionError: a lane is damaged; nothing of this poll counts as handed out.
        """
        events: list[Event] = []
        before = dict(self._cut)
        try:
            while limit is None or len(events) < limit:
                if (step := self.next_batch()) is None:
                    break
                reader, batch = step
                events += codec.decode(batch, reader.lane, reader.body)
        except BaseException:
            self._cut, self._round = before, None
            raise
        return events

    def next_batch(self) -> tuple[LaneReader, pa.RecordBatch] | None:
        """The next wanted events, perhaps none, with the reader that has their bodies; None after the round.

        `cut()` holds them as soon as this returns.

        Raises:
            CorruptionError: a lane is damaged.
        """
        if self._round is None:
            self._round = self._rounds(self._head() if self.until is None else self.until)
        step = next(self._round, None)
        if step is None:
            self._round = None
        return step

    def _head(self) -> dict[str, int]:
        return without_lanes(closed_head(self._store), self._wanted.skip_lanes)

    def _rounds(self, head: Cut) -> Iterator[tuple[LaneReader, pa.RecordBatch]]:
        for lane, end in sorted(head.items()):
            at = self._cut.get(lane, 0)
            if at >= end:
                continue
            reader = self._readers.get(lane)
            if reader is None or reader.next_seq != at:  # new, or an earlier round was not finished
                reader = self._readers[lane] = LaneReader(self._store, lane, at)
            for batch in reader.poll(end):
                self._cut[lane] = reader.next_seq
                yield reader, self._wanted.apply(batch)
            self._cut[lane] = end  # retention may have dropped the last of them

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` may have events, at most so many seconds; returns whether it may.

        Raises:
            CorruptionError: a lane's watermark is missing or unreadable.
        """
        if self._round is not None:
            return True
        return wait_for_growth(self._store, self._cut, timeout_s, self._wanted.skip_lanes) != self._cut

    def rest(self, cut: Cut) -> None:
        """Release everything that reading holds in memory, and continue after this cut, which was
        handed out."""
        self._round = None
        self._readers.clear()
        self._cut = {lane: count for lane, count in cut.items() if count}

    @property
    def held(self) -> int:
        """Bytes of memory, about, that the round holds; 0 between rounds."""
        return 0 if self._round is None else sum(reader.held for reader in self._readers.values())

    def cut(self) -> dict[str, int]:
        """The cut of all events handed out or skipped so far; a closed cut if `at_head`."""
        return dict(self._cut)

    @property
    def at_head(self) -> bool:
        """Whether the last poll came to the end of its round."""
        return self._round is None

    def __exit__(self, *_: object) -> None:
        self._round = None
        self._readers.clear()
