"""Token columns of completed turns, found by their places in lanes: no other part of the log is
decoded.

Of a sealed unit only the row groups that hold the turns are read, and of those only the
requested columns. Unsealed turns are read once, tokens alone, and kept until they are sealed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
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
"""Columns: sequence number, prompt tokens beyond the parent's, sampled tokens, their logprobs, version
spans."""
SPAN = ("version", "start", "end")
"""Fields of a version span: the policy version, its first sampled token, and the first token after it."""
KEPT_BYTES = 128 << 20
"""Of row groups in memory, those read last: neighbours in a batch are often neighbours in a file."""

_NONE = pa.Table.from_batches([], pa.schema([LOG_SCHEMA.field(name) for name in COLUMNS]))

Places = npt.NDArray[np.int64]
_Key = tuple[str, str, int]
"""Lane, unit and row group."""


@dataclass(frozen=True, slots=True)
class TurnViews:
    """Token columns of N turns, an array for each turn: views of the memory that they were read into.

    Attributes:
        prompts: int32, tokens that the prompt adds to its parent's.
        completions: int32 [T], sampled tokens.
        logprobs: float32 [T]; None where the turn has none.
        spans: the fields `SPAN` of each span.
    """

    prompts: list[npt.NDArray[np.int32]]
    completions: list[npt.NDArray[np.int32]]
    logprobs: list[npt.NDArray[np.float32] | None]
    spans: list[list[tuple[int, int, int]]]


class TurnTokens:
    """Reads token columns of turns up to a cut.

    Args:
        store: folder of the store.
        ends: lane -> number of its events that the cut holds.
    """

    def __init__(self, store: Path, ends: Mapping[str, int]) -> None:
        self._store, self._ends = store, dict(ends)
        self._kept: LRUCache[_Key, _Rows] = LRUCache(KEPT_BYTES, lambda rows: rows.nbytes)
        self._scratch = _Scratch()
        self._live: dict[str, tuple[int, _Rows]] = {}

    def read(self, lanes: Sequence[str], seqs: Places, trajectories: Sequence[str]) -> TurnViews:
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
            ids = [trajectories[int(i)] for i in mine]
            parts = while_replaced(self._store, lane, partial(self._of_lane, lane, seqs[mine], ids))
            selected += [_Selection(part.rows, part.at, mine[part.wanted]) for part in parts]
        return _views(len(lanes), selected)

    def _of_lane(
        self, lane: str, seqs: Places, ids: Sequence[str], units: Sequence[Unit]
    ) -> list[_Selection]:
        ends = np.array([unit.next_seq for unit in units], np.int64)
        held_by = np.searchsorted(ends, seqs, side="right")
        selected: list[_Selection] = []
        for number in map(int, np.unique(held_by)):
            mine = np.flatnonzero(held_by == number)
            if number == len(units):
                live = self._unsealed(lane, int(ends[-1]) if len(ends) else 0)
                parts = _find([live], seqs[mine])
            else:
                parts = self._of_unit(units[number], seqs[mine], {ids[int(i)] for i in mine})
            if parts is None:
                raise CorruptionError(f"lane {lane!r}: a completed turn is missing among events {seqs[mine]}")
            selected += [_Selection(part.rows, part.at, mine[part.wanted]) for part in parts]
        return selected

    def _of_unit(self, unit: Unit, seqs: Places, ids: Collection[str]) -> list[_Selection] | None:
        for derived in (True, False):  # the derived file may be of something else
            groups = row_groups_of(self._store, unit, ids, derived=derived)
            selected = _find([self._group(unit, group) for group in groups], seqs)
            if selected is not None:
                return selected
        return None

    def _group(self, unit: Unit, group: int) -> _Rows:
        """A row group: from memory, from the scratch file, or from the unit."""
        key = (unit.lane, unit.name, group)
        if key in self._kept:
            return self._kept[key]
        held = self._scratch.get(key)
        if held is None:
            try:
                held = _rows(read_row_group(self._store, unit, group, COLUMNS))
            except (pa.ArrowException, OSError) as error:
                raise damaged(self._store, unit, TURNS, error) from error
            self._scratch.put(key, held)
        if held.nbytes <= KEPT_BYTES:
            self._kept[key] = held
        return held

    def _unsealed(self, lane: str, start: int) -> _Rows:
        """The completed turns of the lane that are in no unit, in the order of the lane."""
        known = self._live.get(lane)
        if known is None or known[0] != start:
            reader = LaneReader(self._store, lane, start)
            batches = [_completed(pa.Table.from_batches([b])) for b in reader.poll(self._ends[lane])]
            table = pa.concat_tables(batches) if batches else _NONE
            known = self._live[lane] = (start, _rows(table))
        return known[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The columns of R events as flat arrays; row i's part runs from `..._at[i]` to `..._at[i + 1]`.

    The arrays are ordered by item size, so that each is aligned when they follow each other.
    """

    seqs: Places
    prompt_at: Places
    completion_at: Places
    logprob_at: Places
    span_at: Places
    versions: Places
    starts: Places
    ends: Places
    prompts: npt.NDArray[np.int32]
    completions: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    has_logprobs: npt.NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All of them, in order."""
        return [np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """Rows `at` of those that were read; they belong at the places `wanted` of the request."""

    rows: _Rows
    at: Places
    wanted: Places


class _Scratch:
    """Row groups that were decoded before, as plain arrays, in a nameless file that disappears with
    its reader.

    A sample, and most of its row group, is often requested again, in another epoch or another
    order. Mapped from here, only the requested part is touched. If there is no room, nothing
    more is kept.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._at: dict[_Key, tuple[int, list[tuple[np.dtype[Any], int]]]] = {}
        self._end, self._room = 0, 0

    def put(self, key: _Key, rows: _Rows) -> None:
        """Keep a row group."""
        arrays = rows.arrays()
        size = sum(array.nbytes for array in arrays)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rollbook-tokens-", buffering=0)  # noqa: SIM115  # kept
                self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2
            if self._end + size <= self._room:
                written = os.pwritev(self._file.fileno(), [array.data for array in arrays], self._end)
                if written == size:
                    self._at[key] = (self._end, [(array.dtype, array.size) for array in arrays])
                    self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        except OSError:
            self._room = 0  # on a full disk, row groups are decoded again instead of kept

    def get(self, key: _Key) -> _Rows | None:
        """A row group that was kept, or None."""
        if self._file is None or key not in self._at:
            return None
        start, parts = self._at[key]
        size = sum(dtype.itemsize * count for dtype, count in parts)
        data = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ, offset=start)
        arrays, at = list[npt.NDArray[Any]](), 0
        for dtype, count in parts:
            arrays.append(np.frombuffer(data, dtype, count, at))
            at += dtype.itemsize * count
        return _Rows(*arrays)


def _completed(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(rows["kind"], TurnCompleted.KIND)).select(list(COLUMNS))


def _rows(table: pa.Table) -> _Rows:
    spans, span_at, _ = _lists(table["version_spans"])
    prompts, prompt_at, _ = _lists(table["prompt_ids"])
    completions, completion_at, _ = _lists(table["completion_ids"])
    logprobs, logprob_at, has_logprobs = _lists(table["logprobs"])
    versions, starts, ends = (spans.field(name).fill_null(-1).to_numpy().astype(np.int64) for name in SPAN)
    return _Rows(
        seqs=table["seq"].to_numpy(),
        prompt_at=prompt_at,
        completion_at=completion_at,
        logprob_at=logprob_at,
        span_at=span_at,
        versions=versions,
        starts=starts,
        ends=ends,
        prompts=prompts.to_numpy(),
        completions=completions.to_numpy(),
        logprobs=logprobs.to_numpy(),
        has_logprobs=has_logprobs,
    )


def _lists(column: pa.ChunkedArray) -> tuple[pa.Array, Places, npt.NDArray[np.bool_]]:
    """The values of R lists, where each begins and the last ends [R + 1], and which are no nulls [R]."""
    lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which would copy it
    valid = lists.is_valid().to_numpy(zero_copy_only=False)
    at = lists.offsets.to_numpy().astype(np.int64)
    if np.diff(at)[~valid].any():  # a null may have values behind it
        lengths = lists.value_lengths().fill_null(0).to_numpy()
        return lists.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), valid
    return lists.values, at, valid


def _find(parts: Sequence[_Rows], seqs: Places) -> list[_Selection] | None:
    """Where the rows with these sequence numbers are; None where one is not there."""
    if not parts:
        return None
    held = np.concatenate([rows.seqs for rows in parts])
    if not len(held):
        return None
    by_seq = np.argsort(held, kind="stable")
    at = by_seq[np.minimum(np.searchsorted(held, seqs, sorter=by_seq), len(held) - 1)]
    if (held[at] != seqs).any():
        return None
    begins = np.concatenate([[0], np.cumsum([len(rows.seqs) for rows in parts])])
    number = np.searchsorted(begins, at, side="right") - 1
    selected = []
    for part in np.unique(number).tolist():
        wanted = np.flatnonzero(number == part)
        selected.append(_Selection(parts[part], at[wanted] - begins[part], wanted))
    return selected


def _views(count: int, selected: Sequence[_Selection]) -> TurnViews:
    """Each row's part of each column, at its place in the request."""
    nothing: list[Any] = [None] * count
    prompts, completions, logprobs, spans = nothing[:], nothing[:], nothing[:], nothing[:]
    for selection in selected:
        rows, at, wanted = selection.rows, selection.at, selection.wanted.tolist()
        for views, flat, bounds in (
            (prompts, rows.prompts, rows.prompt_at),
            (completions, rows.completions, rows.completion_at),
            (logprobs, rows.logprobs, rows.logprob_at),
        ):
            for place, begin, end in zip(wanted, bounds[at].tolist(), bounds[at + 1].tolist(), strict=True):
                views[place] = flat[begin:end]
        for i in np.flatnonzero(~rows.has_logprobs[at]).tolist():
            logprobs[wanted[i]] = None
        begins, ends = rows.span_at[at].tolist(), rows.span_at[at + 1].tolist()
        first, last = min(begins), max(ends)
        columns = (column[first:last].tolist() for column in (rows.versions, rows.starts, rows.ends))
        triples = list(zip(*columns, strict=True))
        for place, begin, end in zip(wanted, begins, ends, strict=True):
            spans[place] = triples[begin - first : end - first]
    return TurnViews(prompts, completions, logprobs, spans)
