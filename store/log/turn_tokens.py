"""Token columns of completed turns, found by their places in lanes: no other part of the log is
decoded.

Of a sealed unit only the row groups that hold the turns are read, and of those only the
requested columns. Unsealed turns are read once, tokens alone, and kept until they are sealed.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cachetools import LRUCache

from rollbook.store.errors import CorruptionError
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.parquet import damaged
from rollbook.store.sealed.point_read import read_row_groups, row_groups_of
from rollbook.store.sealed.unit import TURNS, Unit, while_replaced

COLUMNS = ("seq", "prompt_ids", "completion_ids", "logprobs", "version_spans")
"""Columns: sequence number, prompt tokens beyond the parent's, sampled tokens, their logprobs, version
spans."""
SPAN = ("version", "start", "end")
"""Fields of a version span: the policy version, its first sampled token, and the first token after it."""
KEPT_BYTES = 128 << 20
"""Of row groups in memory, those read last: neighbours in a batch are often neighbours in a file."""

Places = npt.NDArray[np.int64]
_Key = tuple[str, str, int]
"""Lane, unit and row group."""


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """N lists, each a view of one of the arrays that hold their values.

    Attributes:
        arrays: the values of many lists, one after the other.
        array, begin, end: int64 [N], of each list its array, and where it begins and ends there.
    """

    arrays: Sequence[npt.NDArray[Any]]
    array: Places
    begin: Places
    end: Places

    @property
    def lengths(self) -> Places:
        """Of each list, int64 [N]."""
        return self.end - self.begin

    def of(self, which: npt.NDArray[np.bool_]) -> Lists:
        """Some of these lists."""
        return Lists(self.arrays, self.array[which], self.begin[which], self.end[which])

    def joined(self) -> npt.NDArray[Any]:
        """The values of all lists, one list after the other."""
        if not len(self.array):
            return self.arrays[0][:0]
        # Neighbours in an array, as the turns of a trajectory are in a sealed file, are copied together.
        apart = np.flatnonzero((self.array[1:] != self.array[:-1]) | (self.begin[1:] != self.end[:-1]))
        first, last = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(self.array) - 1]])
        bounds = (self.array[first].tolist(), self.begin[first].tolist(), self.end[last].tolist())
        return np.concatenate([self.arrays[i][begin:end] for i, begin, end in zip(*bounds, strict=True)])

    def woven(self, other: Lists) -> npt.NDArray[Any]:
        """The values of each list and of the other's at its place, one after the other."""
        parts = [self.arrays[0][:0]] * (2 * len(self.array))
        parts[::2], parts[1::2] = self._each(), other._each()
        return np.concatenate([self.arrays[0][:0], *parts])

    def _each(self) -> list[npt.NDArray[Any]]:
        bounds = (self.array.tolist(), self.begin.tolist(), self.end.tolist())
        return [self.arrays[i][begin:end] for i, begin, end in zip(*bounds, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class TurnLists:
    """Token columns of N turns.

    Attributes:
        prompts: int32, tokens that the prompt adds to its parent's.
        completions: int32, sampled tokens; logprobs: float32, one for each of them.
        spans: int64 [3], the fields `SPAN` of each span.
        has_logprobs: bool [N]; without, a turn's list of them is empty.
    """

    prompts: Lists
    completions: Lists
    logprobs: Lists
    spans: Lists
    has_logprobs: npt.NDArray[np.bool_]


class TurnTokens:
    """Reads token columns of turns up to a cut.

    Args:
        store: folder of the store.
        ends: lane -> number of its events that the cut holds.
        spans: read the version spans, too; else turns have none.
    """

    def __init__(self, store: Path, ends: Mapping[str, int], *, spans: bool = True) -> None:
        self._store, self._ends = store, dict(ends)
        self._columns = COLUMNS if spans else COLUMNS[:-1]
        self._scratch = _Scratch()
        self._kept = _Kept(self._scratch)
        self._live: dict[str, tuple[int, _Rows]] = {}

    def read(self, lanes: Sequence[str], seqs: Places, trajectories: Sequence[str]) -> TurnLists:
        """Token columns of N completed turns, in the order asked for.

        Args:
            lanes, seqs: place of each turn's `turn.completed` event; trajectories: id of each one's.

        Raises:
            CorruptionError: a file is damaged, or holds no such event.
            RemoteError: object storage does not answer.
        """
        names = np.asarray(lanes)
        selected: list[_Selection] = []
        for lane in dict.fromkeys(lanes):
            mine = np.flatnonzero(names == lane)
            ids = [trajectories[i] for i in mine.tolist()]
            parts = while_replaced(self._store, lane, partial(self._of_lane, lane, seqs[mine], ids))
            selected += [_Selection(part.rows, part.at, mine[part.wanted]) for part in parts]
        return _turn_lists(len(lanes), selected)

    def _of_lane(
        self, lane: str, seqs: Places, ids: Sequence[str], units: Sequence[Unit]
    ) -> list[_Selection]:
        ends = np.array([unit.next_seq for unit in units], np.int64)
        held_by = np.searchsorted(ends, seqs, side="right")
        selected: list[_Selection] = []
        for number in np.unique(held_by).tolist():
            mine = np.flatnonzero(held_by == number)
            if number == len(units):
                rows = [self._unsealed(lane, int(ends[-1]) if len(ends) else 0)]
                at = _find(rows, seqs[mine])
            else:
                rows, at = self._of_unit(units[number], seqs[mine], {ids[i] for i in mine.tolist()})
            if at is None:
                raise CorruptionError(f"lane {lane!r}: a completed turn is missing among events {seqs[mine]}")
            selected.append(_Selection(rows, at, mine))
        return selected

    def _of_unit(self, unit: Unit, seqs: Places, ids: Collection[str]) -> tuple[list[_Rows], Places | None]:
        rows, at = list[_Rows](), None
        for derived in (True, False):  # the derived file may be of something else
            rows = self._groups(unit, row_groups_of(self._store, unit, ids, derived=derived))
            if (at := _find(rows, seqs)) is not None:
                break
        return rows, at

    def _groups(self, unit: Unit, groups: Sequence[int]) -> list[_Rows]:
        """Row groups: from memory, from the scratch file, or from the unit."""
        name, held, missing = unit.name, dict[int, _Rows](), list[int]()
        for group in groups:
            rows = self._kept.get((unit.lane, name, group))
            if rows is None and (rows := self._scratch.get((unit.lane, name, group))) is not None:
                self._kept.keep((unit.lane, name, group), rows)
            if rows is None:
                missing.append(group)
            else:
                held[group] = rows
        try:
            for some, counts, table in read_row_groups(self._store, unit, missing, self._columns):
                together = _rows([_whole(column) for column in table.columns])
                for group, rows in zip(some, _apart(together, counts), strict=True):
                    self._kept.keep((unit.lane, name, group), rows)
                    held[group] = rows
        except (pa.ArrowException, OSError) as error:
            raise damaged(self._store, unit, TURNS, error) from error
        return [held[group] for group in groups]

    def _unsealed(self, lane: str, start: int) -> _Rows:
        """The events of the lane that are in no unit, in the order of the lane."""
        known = self._live.get(lane)
        if known is None or known[0] != start:
            batches = LaneReader(self._store, lane, start).poll(self._ends[lane])
            schema = pa.schema([LOG_SCHEMA.field(name) for name in self._columns])
            table = pa.Table.from_batches([batch.select(self._columns) for batch in batches], schema)
            # Copied in any case: what was checked is in a file that may be damaged later.
            known = self._live[lane] = (start, _rows([column.combine_chunks() for column in table.columns]))
        return known[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The columns of R events as flat arrays.

    The arrays are ordered by item size, so that each is aligned when they follow each other.

    Attributes:
        seqs: int64 [R].
        begins, ends: int64 [4, R], where each row's part of the arrays `_LISTS` is, in their order.
    """

    seqs: Places
    begins: Places
    ends: Places
    spans: Places
    prompts: npt.NDArray[np.int32]
    completions: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    has_logprobs: npt.NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All of them, in order."""
        return [getattr(self, field.name) for field in fields(self)]


_LISTS = ("prompts", "completions", "logprobs", "spans")
"""Arrays of values, in the order of `COLUMNS`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """Rows that were read; of these, counted through, the ones `at` belong at the places `wanted`
    of the request."""

    rows: Sequence[_Rows]
    at: Places
    wanted: Places


class _Kept(LRUCache[_Key, _Rows]):
    """The row groups that were read last; what there is no more room for goes to the scratch file."""

    def __init__(self, scratch: _Scratch) -> None:
        super().__init__(KEPT_BYTES, lambda rows: rows.nbytes)
        self._scratch = scratch

    def keep(self, key: _Key, rows: _Rows) -> None:
        """Keep a row group, here or, if it is too large, in the scratch file."""
        if rows.nbytes > self.maxsize:
            self._scratch.put(key, rows)
        else:
            self[key] = rows

    def popitem(self) -> tuple[_Key, _Rows]:
        """Let the row group go that was not read for longest."""
        key, rows = super().popitem()
        self._scratch.put(key, rows)
        return key, rows


class _Scratch:
    """Row groups that were decoded before, as plain arrays, in a nameless file that disappears with
    its reader.

    A sample, and most of its row group, is often requested again, in another epoch or another
    order. Mapped from here, only the requested part is touched. If there is no room, nothing
    more is kept.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._at: dict[_Key, tuple[int, list[tuple[np.dtype[Any], tuple[int, ...]]]]] = {}
        self._end, self._room = 0, 0

    def put(self, key: _Key, rows: _Rows) -> None:
        """Keep a row group, if it is not kept yet."""
        if key in self._at:
            return
        arrays = [np.ascontiguousarray(array) for array in rows.arrays()]
        size = sum(array.nbytes for array in arrays)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rollbook-tokens-", buffering=0)  # noqa: SIM115  # kept
                self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2
            if self._end + size <= self._room:
                written = os.pwritev(self._file.fileno(), [array.data for array in arrays], self._end)
                if written == size:
                    self._at[key] = (self._end, [(array.dtype, array.shape) for array in arrays])
                    self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        except OSError:
            self._room = 0  # on a full disk, row groups are decoded again instead of kept

    def get(self, key: _Key) -> _Rows | None:
        """A row group that was kept, or None."""
        if self._file is None or key not in self._at:
            return None
        start, parts = self._at[key]
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
        data = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ, offset=start)
        arrays, at = list[npt.NDArray[Any]](), 0
        for dtype, shape in parts:
            arrays.append(np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
        return _Rows(*arrays)


def _rows(columns: Sequence[Any]) -> _Rows:
    """The rows of arrays, one for each of `COLUMNS`; the spans may be missing."""
    seqs, *lists = columns
    begins, ends = np.zeros((2, len(_LISTS), len(seqs)), np.int64)
    for i, column in enumerate(lists):
        at = column.offsets.to_numpy()
        begins[i], ends[i] = at[:-1], at[1:]
        if column.null_count:  # a null may have values behind it
            np.copyto(ends[i], begins[i], where=column.is_null().to_numpy(zero_copy_only=False))
    prompts, completions, logprobs, *spans = lists
    numbers = np.empty((sum(len(column.values) for column in spans), len(SPAN)), np.int64)
    for column in spans:
        for i, name in enumerate(SPAN):
            numbers[:, i] = column.values.field(name).fill_null(-1).to_numpy()
    return _Rows(
        seqs=seqs.to_numpy(),
        begins=begins,
        ends=ends,
        spans=numbers,
        prompts=prompts.values.to_numpy(),
        completions=completions.values.to_numpy(),
        logprobs=logprobs.values.to_numpy(),
        has_logprobs=logprobs.is_valid().to_numpy(zero_copy_only=False),
    )


def _apart(rows: _Rows, counts: Sequence[int]) -> list[_Rows]:
    """Rows in parts of so many each; a part is a copy, so that it does not keep the memory of the others."""
    values = {name: getattr(rows, name) for name in _LISTS}
    bounds = np.concatenate([rows.begins, [[len(array)] for array in values.values()]], axis=1)
    parts = []
    for start, end in pairwise(accumulate(counts, initial=0)):
        low, high = bounds[:, start], bounds[:, end]
        own = zip(values.items(), low.tolist(), high.tolist(), strict=True)
        parts.append(
            _Rows(
                seqs=rows.seqs[start:end].copy(),
                begins=rows.begins[:, start:end] - low[:, None],
                ends=rows.ends[:, start:end] - low[:, None],
                has_logprobs=rows.has_logprobs[start:end].copy(),
                **{name: array[first:last].copy() for (name, array), first, last in own},
            )
        )
    return parts


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece; one that is so already is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _find(parts: Sequence[_Rows], seqs: Places) -> Places | None:
    """Where the rows with these sequence numbers are, counted through all parts; None where one is not
    there."""
    held = _joined([rows.seqs for rows in parts])
    if not len(held):
        return None
    by_seq = np.argsort(held, kind="stable")
    at = by_seq[np.minimum(np.searchsorted(held, seqs, sorter=by_seq), len(held) - 1)]
    return None if (held[at] != seqs).any() else at


def _turn_lists(count: int, selected: Sequence[_Selection]) -> TurnLists:
    """Each row's part of each column, at its place in the request."""
    parts: list[_Rows] = []
    part = np.empty(count, np.int64)
    begins, ends = np.empty((len(_LISTS), count), np.int64), np.empty((len(_LISTS), count), np.int64)
    has_logprobs = np.empty(count, np.bool_)
    for selection in selected:
        rows, at, wanted = selection.rows, selection.at, selection.wanted
        numbers = np.repeat(np.arange(len(rows)), [len(each.seqs) for each in rows])
        part[wanted] = len(parts) + numbers[at]
        begins[:, wanted] = _joined([each.begins for each in rows])[:, at]
        ends[:, wanted] = _joined([each.ends for each in rows])[:, at]
        has_logprobs[wanted] = _joined([each.has_logprobs for each in rows])[at]
        parts += rows
    prompts, completions, logprobs, spans = (
        Lists([getattr(rows, name) for rows in parts], part, begins[i], ends[i])
        for i, name in enumerate(_LISTS)
    )
    return TurnLists(prompts, completions, logprobs, spans, has_logprobs)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The arrays as one, along their last axis; a single one is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays, axis=-1) if arrays else np.empty(0, np.int64)
