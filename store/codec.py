"""Events <-> rows <-> Arrow record batches. Pure: no file is touched here.

A row is an event's values in the order of `schema.LOG_SCHEMA` without `seq`; `extra` is JSON bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.bodies import resolve
from rollbook.store.errors import CorruptionError, FormatError
from rollbook.store.event_json import as_json, from_json
from rollbook.store.events import RECORDS, Event, TurnRequested, VersionSpan
from rollbook.store.schema import ENVELOPE, HOT, LOG_SCHEMA, SPAN
from rollbook.store.upcast import upcast, version_of

__all__ = ["as_json", "conform", "decode", "encode", "from_json", "inline_bodies", "row_of", "to_batch"]

Row = tuple[Any, ...]
Body = Callable[[str], Any]
"""Digest -> the body that a request refers to."""

ROW_NAMES = tuple(LOG_SCHEMA.names[1:])
_ARRAYS = {"prompt_ids": np.int32, "completion_ids": np.int32, "logprobs": np.float32}
_MAY_REFER = ("messages", "request")
"""Fields of `turn.requested` that may hold references to bodies."""


class _Fields:
    """How a kind's record becomes a row: which fields are columns of `HOT`, which go to `extra`."""

    def __init__(self, record_type: type[Any]) -> None:
        names = [f.name for f in fields(record_type)]
        self.hot = tuple(n for n in HOT if n in names)
        self.rest = tuple(n for n in names if n not in HOT)
        self._at = tuple(HOT.index(n) for n in self.hot)

    def columns(self, record: Any) -> list[Any]:
        """The values of `HOT`, None where the record has no such field."""
        values: list[Any] = [None] * len(HOT)
        for i, name in zip(self._at, self.hot, strict=True):
            values[i] = getattr(record, name)
        return values

    def extra(self, record: Any) -> bytes:
        """The other fields as JSON."""
        return orjson.dumps({name: getattr(record, name) for name in self.rest})


_FIELDS = {kind: _Fields(record_type) for kind, record_type in RECORDS.items()}
_VERSIONS = {kind: version_of(kind) for kind in RECORDS}


def row_of(event: Event) -> Row:
    """The event as a row."""
    record = event.record
    kind = record.KIND
    of = _FIELDS[kind]
    head = (event.event_id, kind, _VERSIONS[kind], event.time_us, event.run)
    return (*head, *of.columns(record), of.extra(record))


def to_batch(rows: Sequence[Row], first_seq: int) -> pa.RecordBatch:
    """Rows as one batch in `LOG_SCHEMA`; row i gets sequence number `first_seq + i`."""
    columns = dict(zip(ROW_NAMES, zip(*rows, strict=True), strict=True))
    seq = pa.array(np.arange(first_seq, first_seq + len(rows), dtype=np.int64))
    arrays = [seq, *(_arrow(f.name, f.type, columns[f.name]) for f in list(LOG_SCHEMA)[1:])]
    return pa.record_batch(arrays, schema=LOG_SCHEMA)


def encode(events: Sequence[Event], first_seq: int) -> pa.RecordBatch:
    """One batch in `LOG_SCHEMA`; event i gets sequence number `first_seq + i`."""
    return to_batch([row_of(event) for event in events], first_seq)


def _arrow(name: str, type_: pa.DataType, values: Sequence[Any]) -> pa.Array:
    if name in _ARRAYS:
        return _lists(values, type_.value_type, _ARRAYS[name])
    if name == "version_spans":
        return _spans(values)
    if name == "time":
        return pa.array(np.array(values, dtype=np.int64)).cast(type_)
    return pa.array(values, type_)


def _offsets(values: Sequence[Any]) -> tuple[pa.Array, pa.Array | None]:
    """Offsets of a list column, and its mask of nulls if it has any."""
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([0 if v is None else len(v) for v in values], out=offsets[1:])
    mask = [v is None for v in values]
    return pa.array(offsets), pa.array(mask) if any(mask) else None


def _lists(values: Sequence[Any], value_type: pa.DataType, dtype: Any) -> pa.Array:
    """A list column built from arrays without a Python object per token."""
    offsets, mask = _offsets(values)
    present = [np.asarray(v, dtype=dtype) for v in values if v is not None]
    flat = np.concatenate(present) if present else np.empty(0, dtype)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, value_type), mask=mask)


def _spans(values: Sequence[Any]) -> pa.Array:
    offsets, mask = _offsets(values)
    flat = [span for spans in values if spans is not None for span in spans]
    members = [pa.array([getattr(s, f.name) for s in flat], f.type) for f in SPAN]
    return pa.ListArray.from_arrays(
        offsets, pa.StructArray.from_arrays(members, fields=list(SPAN)), mask=mask
    )


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of an older release in this one's columns; what it does not have is null.

    Raises:
        FormatError: it has a column, or a type, that this release does not know.
    """
    if batch.schema.equals(LOG_SCHEMA):
        return batch
    unknown = [f.name for f in batch.schema if f.name not in LOG_SCHEMA.names]
    if unknown:
        raise FormatError(
            f"written with other columns, {unknown}, that this release does not know: update rollbook"
        )
    arrays = []
    for f in LOG_SCHEMA:
        found = batch.schema.get_field_index(f.name)
        if found >= 0 and batch.schema.field(found).type != f.type:
            raise FormatError(f"column {f.name!r} has type {batch.schema.field(found).type}, not {f.type}")
        arrays.append(batch.column(found) if found >= 0 else pa.nulls(batch.num_rows, f.type))
    return pa.record_batch(arrays, schema=LOG_SCHEMA)


def no_body(digest: str) -> Any:
    """The `Body` of a place without bodies.

    Raises:
        CorruptionError: always.
    """
    raise CorruptionError(f"a request refers to body {digest}, which its segment does not hold")


def decode(batch: pa.RecordBatch, lane: str, body: Body = no_body) -> Iterator[Event]:
    """The batch's events, in order. References to bodies are replaced by what `body` gives.

    Raises:
        FormatError: a kind or schema version this release does not know.
        CorruptionError: a body is missing.
    """
    # `time` is read as integers below: a Python datetime cannot hold all that the column can.
    plain = [name for name in LOG_SCHEMA.names if name not in _ARRAYS and name != "time"]
    rows = {name: batch.column(name).to_pylist() for name in plain}
    arrays = {name: _numpy_lists(batch.column(name)) for name in _ARRAYS}
    times = batch.column("time").cast(pa.int64()).to_pylist()
    for i in range(batch.num_rows):
        kind = rows["kind"][i]
        record_type = RECORDS.get(kind)
        if record_type is None:
            raise FormatError(
                f"event {rows['event_id'][i]} has kind {kind!r}, which this release cannot read: "
                "update rollbook"
            )
        version = rows["schema_version"][i]
        if not 1 <= version <= version_of(kind):
            raise FormatError(
                f"event {rows['event_id'][i]} of kind {kind!r} has version {version}, this release reads "
                f"up to {version_of(kind)}: update rollbook"
            )
        hot = _FIELDS[kind].hot
        values = orjson.loads(rows["extra"][i])
        for name in hot:
            values[name] = arrays[name][i] if name in arrays else rows[name][i]
        values = upcast(kind, version, values)
        if "version_spans" in hot:
            values["version_spans"] = tuple(VersionSpan(**s) for s in values["version_spans"] or ())
        if record_type is TurnRequested and '"$body"' in rows["extra"][i]:
            values |= {name: resolve(values[name], body) for name in _MAY_REFER}
        yield Event(
            record=record_type(**values),
            run=rows["run"][i],
            event_id=rows["event_id"][i],
            time_us=times[i],
            lane=lane,
            seq=rows["seq"][i],
        )


def _numpy_lists(column: pa.ListArray) -> list[Any]:
    """One numpy view per row (None where null), sharing the batch's memory."""
    flat = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]


def inline_bodies(batch: pa.RecordBatch, body: Body) -> pa.RecordBatch:
    """The batch with every reference to a body replaced, for readers that do not have the segment.

    Raises:
        CorruptionError: a body is missing.
    """
    column = batch.column("extra")
    refers = pc.and_(
        pc.equal(batch.column("kind"), TurnRequested.KIND), pc.match_substring(column, '"$body"')
    )
    if not pc.any(refers).as_py():
        return batch
    texts = column.to_pylist()
    for i in np.flatnonzero(refers.to_numpy(zero_copy_only=False)):
        values = orjson.loads(texts[i])
        values |= {name: resolve(values[name], body) for name in _MAY_REFER}
        texts[i] = orjson.dumps(values).decode()
    return batch.set_column(batch.schema.get_field_index("extra"), "extra", pa.array(texts, pa.string()))


assert set(ENVELOPE) | set(HOT) == set(LOG_SCHEMA.names)
assert ("event_id", "kind", "schema_version", "time", "run", *HOT, "extra") == ROW_NAMES
