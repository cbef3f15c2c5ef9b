"""Token columns of completed turns, found by their places in lanes: nothing else of the log is decoded.

Of a sealed unit only the row groups that hold the turns are read, and of those only the columns asked for.
What is not sealed is read once, tokens alone, and kept until it is sealed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from cachetools import LRUCache

from rollbook.store.errors import CorruptionError
from rollbook.store.events import TurnCompleted
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.parquet import damaged
from rollbook.store.sealed.point_read import read_row_group, row_groups_of
from rollbook.store.sealed.unit import TURNS, Unit, while_replaced

COLUMNS = ("seq", "prompt_ids", "completion_ids", "logprobs", "version_spans")
"""Place, tokens that the prompt adds, sampled tokens, a logprob for each, and which version sampled which."""
KEPT_GROUPS = 64
"""Row groups in memory, those read last: neighbours in a batch are often neighbours in a file."""

_NONE = pa.Table.from_batches([], pa.schema([LOG_SCHEMA.field(name) for name in COLUMNS]))

Places = npt.NDArray[np.int64]
_Key = tuple[str, str, int]
"""Lane, unit and row group."""


class TurnTokens:
    """Reads token columns of turns up to a cut.

    Args:
        store: folder of the store.
        ends: lane -> number of its events that the cut holds.
    """

    def __init__(self, store: Path, ends: Mapping[str, int]) -> None:
        self._store, self._ends = store, dict(ends)
        self._kept: LRUCache[_Key, pa.Table] = LRUCache(KEPT_GROUPS)
        self._scratch = _Scratch()
        self._live: dict[str, tuple[int, pa.Table]] = {}

    def read(self, lanes: Sequence[str], seqs: Places, trajectories: Sequence[str]) -> pa.Table:
        """The columns `COLUMNS` of N completed turns, in the order asked for.

        Args:
            lanes, seqs: place of each turn's `turn.completed` event; trajectories: id of each one's.

        Raises:
            CorruptionError: a file is damaged, or holds no such event.
            RemoteError: object storage does not answer.
        """
        names = np.asarray(lanes)
        parts, order = [], []
        for lane in dict.fromkeys(lanes):
            mine = np.flatnonzero(names == lane)
            ids = [trajectories[int(i)] for i in mine]
            part = partial(self._of_lane, lane, seqs[mine], ids)
            parts.append(while_replaced(self._store, lane, part))
            order.append(mine)
        return _reordered(parts, order)

    def _of_lane(self, lane: str, seqs: Places, ids: Sequence[str], units: Sequence[Unit]) -> pa.Table:
        ends = np.array([unit.next_seq for unit in units], np.int64)
        held_by = np.searchsorted(ends, seqs, side="right")
        parts, order = [], []
        for number in map(int, np.unique(held_by)):
            mine = np.flatnonzero(held_by == number)
            if number == len(units):
                found = _at(self._unsealed(lane, int(ends[-1]) if len(ends) else 0), seqs[mine])
            else:
                found = self._of_unit(units[number], seqs[mine], {ids[int(i)] for i in mine})
            if found is None:
                raise CorruptionError(f"lane {lane!r}: a completed turn is missing among events {seqs[mine]}")
            parts.append(found)
            order.append(mine)
        return _reordered(parts, order)

    def _of_unit(self, unit: Unit, seqs: Places, ids: Collection[str]) -> pa.Table | None:
        for derived in (True, False):  # the derived file may be of something else
            groups = row_groups_of(self._store, unit, ids, derived=derived)
            if groups:
                found = _at(pa.concat_tables([self._group(unit, group) for group in groups]), seqs)
                if found is not None:
                    return found
        return None

    def _group(self, unit: Unit, group: int) -> pa.Table:
        """A row group's completed turns: from memory, from the scratch file, or from the unit."""
        key = (unit.lane, unit.name, group)
        if key in self._kept:
            return self._kept[key]
        held = self._scratch.get(key)
        if held is None:
            try:
                held = _completed(read_row_group(self._store, unit, group, ["kind", *COLUMNS]))
            except (pa.ArrowException, OSError) as error:
                raise damaged(self._store, unit, TURNS, error) from error
            self._scratch.put(key, held)
        self._kept[key] = held
        return held

    def _unsealed(self, lane: str, start: int) -> pa.Table:
        """The completed turns of the lane that are in no unit, in the order of the lane."""
        known = self._live.get(lane)
        if known is None or known[0] != start:
            reader = LaneReader(self._store, lane, start)
            batches = [_completed(pa.Table.from_batches([b])) for b in reader.poll(self._ends[lane])]
            table = pa.concat_tables(batches) if batches else _NONE
            known = self._live[lane] = (start, table.combine_chunks())
        return known[1]


class _Scratch:
    """Row groups that were decoded before, uncompressed, in a file without a name that goes with its reader.

    A sample is often asked for again, and most of what is in its row group too, in another epoch or another
    order. Reading it here takes a twentieth of what decoding takes. Where there is no room it keeps no more.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._at: dict[_Key, tuple[int, int]] = {}
        self._end, self._room = 0, 0

    def put(self, key: _Key, table: pa.Table) -> None:
        """Keep a table."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        data = sink.getvalue()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rollbook-tokens-", buffering=0)  # noqa: SIM115  # kept
                self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2
            if self._end + data.size <= self._room:
                os.pwrite(self._file.fileno(), data, self._end)
                self._at[key] = (self._end, data.size)
                self._end += data.size
        except OSError:
            self._room = 0  # a full disk: what is not kept is decoded again

    def get(self, key: _Key) -> pa.Table | None:
        """A table that was kept, or None."""
        if self._file is None or key not in self._at:
            return None
        start, size = self._at[key]
        data = os.pread(self._file.fileno(), size, start)
        return pa.ipc.open_stream(pa.py_buffer(data)).read_all() if len(data) == size else None


def _completed(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(rows["kind"], TurnCompleted.KIND)).select(list(COLUMNS))


def _at(table: pa.Table, seqs: Places) -> pa.Table | None:
    """The rows with these sequence numbers, in this order; None where one is not there."""
    held = table["seq"].to_numpy()
    if not len(held):
        return None
    by_seq = np.argsort(held, kind="stable")
    found = np.minimum(np.searchsorted(held, seqs, sorter=by_seq), len(held) - 1)
    rows = by_seq[found]
    return table.take(pa.array(rows)) if (held[rows] == seqs).all() else None


def _reordered(parts: Sequence[pa.Table], order: Sequence[npt.NDArray[Any]]) -> pa.Table:
    """The rows of the parts, of which `order` says where each is to stand."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate(order)
    inverse = np.empty(len(places), np.int64)
    inverse[places] = np.arange(len(places))
    return pa.concat_tables(parts).take(pa.array(inverse))
