"""Events <-> rows <-> Arrow record batches. Pure: no file is touched here.

A row is an event's values in the order of `schema.LOG_SCHEMA` without `seq`; `extra` is JSON bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import index
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.errors import CorruptionError, FormatError
from rollbook.store.events import RECORDS, Event, VersionSpan
from rollbook.store.events.blobs import resolve
from rollbook.store.events.event import about, kinds_where
from rollbook.store.events.event_json import as_json, from_json
from rollbook.store.events.schema import ENVELOPE, HOT, LOG_SCHEMA
from rollbook.store.events.upcast import upcast, version_of

__all__ = [
    "as_json",
    "conform",
    "decode",
    "encode",
    "from_json",
    "inline_bodies",
    "refers",
    "row_of",
    "to_batch",
]

Row = tuple[Any, ...]
Body = Callable[[str], Any]
"""Digest -> the body that a request or a completion refers to."""

ROW_NAMES = tuple(LOG_SCHEMA.names[1:])
# Arrow makes new Python objects whenever a schema is asked for its parts, and every batch needs the types.
_ROW_TYPES = tuple(LOG_SCHEMA.types[1:])
_INT32_MAX = 2**31 - 1
ARRAYS = {
    name: np.dtype(t) for name, t in (("prompt_ids", "i4"), ("completion_ids", "i4"), ("logprobs", "f4"))
}
"""Columns of arrays, and what the arrays hold."""
_INTEGERS = ("policy_version", "step")
MAY_REFER = {kind: about(kind).large for kind in kinds_where(lambda said: said.large)}
"""Kind -> its fields that may hold references to bodies."""


class _Fields:
    """How a kind's record becomes a row: which fields are columns of `HOT`, which go to `extra`."""

    def __init__(self, kind: str, record_type: type[Any]) -> None:
        types = {f.name: str(f.type) for f in fields(record_type)}
        self.hot = tuple(n for n in HOT if n in types)
        self.row: Callable[[Event], Row] = _taker(kind, types)


def _taker(kind: str, types: Mapping[str, str]) -> Callable[[Event], Row]:
    """A function that makes a row of an event of this kind, whose record has fields of these types.

    Every append passes through it, so it is written out for the kind, as dataclasses write their methods:
    that takes half the time of going through lists of names.
    """
    extra = ", ".join(f"{name!r}: r.{name}" for name in types if name not in HOT)
    hot = {name: f"r.{name}" if name in types else "None" for name in HOT}
    if types.get("trajectory_id") == "str":  # the views go by it
        hot["trajectory_id"] = "r.trajectory_id if r.trajectory_id is not None else missing()"
    head = f"e.event_id, {kind!r}, {version_of(kind)}, e.time_us, e.run"
    source = f"lambda e: (r := e.record) and ({head}, {', '.join(hot.values())}, dumps({{{extra}}}))"

    def missing() -> None:
        raise TypeError(f"a {kind} has no trajectory_id")

    taker: Callable[[Event], Row] = eval(source, {"dumps": orjson.dumps, "missing": missing})
    return taker


_FIELDS = {kind: _Fields(kind, record_type) for kind, record_type in RECORDS.items()}


def row_of(event: Event) -> Row:
    """The event as a row.

    Raises:
        TypeError: a value has no JSON form, or an id is missing.
    """
    return _FIELDS[event.record.KIND].row(event)


def to_batch(rows: Sequence[Row], first_seq: int) -> pa.RecordBatch:
    """Rows as one batch in `LOG_SCHEMA`; row i gets sequence number `first_seq + i`."""
    seq = pa.array(np.arange(first_seq, first_seq + len(rows), dtype=np.int64))
    columns = zip(ROW_NAMES, _ROW_TYPES, zip(*rows, strict=True), strict=True)
    return pa.record_batch([seq, *(_column(*column) for column in columns)], schema=LOG_SCHEMA)


def encode(events: Sequence[Event], first_seq: int) -> pa.RecordBatch:
    """One batch in `LOG_SCHEMA`; event i gets sequence number `first_seq + i`."""
    return to_batch([row_of(event) for event in events], first_seq)


def _column(name: str, type_: pa.DataType, values: Sequence[Any]) -> pa.Array:
    if name in ARRAYS:
        dtype = ARRAYS[name]
        return pa.array([None if v is None else stored_array(v, dtype) for v in values], type_)
    if name == "version_spans":
        return pa.array([None if v is None else [_span(s) for s in v] for v in values], type_)
    if name == "extra":
        return _json(values)
    if name == "time":
        return pa.array(np.array(values, dtype=np.int64)).view(type_)
    if name in _INTEGERS:
        values = [whole(value) for value in values]
    return pa.array(values, type_)


def whole(value: Any) -> int | None:
    """The value, which is an integer or None. Arrow would cut off a fraction without a word.

    Raises:
        TypeError: it is something else.
    """
    return None if value is None else index(value)


def real(value: Any) -> float | None:
    """The value as the float64 that is stored of it, or None.

    Raises:
        ValueError: it would be another number.
    """
    if value is None or type(value) is float:
        return value
    number = float(value)
    if number != value and value == value:
        raise ValueError(f"{value!r} is no float64")
    return number


def utf8(text: bytes) -> bytes:
    """The text, if it is UTF-8.

    Raises:
        UnicodeDecodeError: it is not.
    """
    if not text.isascii():
        str(text, "utf-8")
    return text


def stored_array(values: Any, dtype: Any) -> Any:
    """Values as the one-dimensional array that is stored of them; token ids keep their value.

    Raises:
        ValueError: they are no list of numbers, or an integer among them does not fit.
    """
    found = np.asarray(values)
    if found.ndim != 1:
        raise ValueError(f"a list of numbers has one dimension, this has {found.ndim}")
    if found.dtype == dtype:
        return found
    if found.size and found.dtype.kind not in ("iu" if np.dtype(dtype).kind == "i" else "iuf"):
        raise ValueError(f"an array of {found.dtype} cannot be stored as {np.dtype(dtype)}")
    stored = found.astype(dtype)
    if stored.dtype.kind == "i" and not np.array_equal(stored, found):
        raise ValueError(f"an integer does not fit into {stored.dtype}")
    return stored


def _span(span: VersionSpan) -> tuple[str, int | None, int | None, int | None]:
    return span.policy, whole(span.version), whole(span.start), whole(span.end)


def _json(values: Sequence[bytes]) -> pa.Array:
    """A column of JSON texts, copied once; `pa.array` would copy them again whenever its buffer grows."""
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    if offsets[-1] > _INT32_MAX:
        raise ValueError(f"{offsets[-1]} bytes of JSON are more than one append can hold: split it")
    buffers = (pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(values)))
    return pa.StringArray.from_buffers(len(values), *buffers)


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
    raise CorruptionError(f"a turn refers to body {digest}, which its segment does not hold")


def decode(batch: pa.RecordBatch, lane: str, body: Body = no_body) -> Iterator[Event]:
    """The batch's events, in order. References to bodies are replaced by what `body` gives.

    Raises:
        FormatError: a kind or schema version this release does not know.
        CorruptionError: a body is missing, or a record is none of its kind.
    """
    # `time` is read as integers below: a Python datetime cannot hold all that the column can.
    plain = [name for name in LOG_SCHEMA.names if name not in ARRAYS and name != "time"]
    try:
        columns = {name: batch.column(name).to_pylist() for name in plain}
        columns |= {name: _numpy_lists(batch.column(name)) for name in ARRAYS}
        times = batch.column("time").cast(pa.int64()).to_pylist()
    except (ValueError, pa.ArrowException) as error:
        raise CorruptionError(
            f"events of lane {lane!r} are whole, but not in its columns: {error}"
        ) from error
    for i in range(batch.num_rows):
        event_id = columns["event_id"][i]
        try:
            record = _record(columns, i, body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptionError(
                f"event {event_id} of lane {lane!r} is whole, but no {columns['kind'][i]!r}: {error!r}"
            ) from error
        yield Event(record, columns["run"][i], event_id, times[i], lane, columns["seq"][i])


def _record(columns: Mapping[str, Any], i: int, body: Body) -> Any:
    """The record in row i of these columns."""
    kind, version = columns["kind"][i], columns["schema_version"][i]
    record_type = RECORDS.get(kind)
    if record_type is None or not 1 <= version <= version_of(kind):
        event = f"event {columns['event_id'][i]} has kind {kind!r}"
        if record_type is None:
            raise FormatError(f"{event}, which this release cannot read: update rollbook")
        newest = version_of(kind)
        raise FormatError(f"{event} in version {version}, this release reads up to {newest}: update rollbook")
    extra = columns["extra"][i]
    values = orjson.loads(extra)
    for name in _FIELDS[kind].hot:
        values[name] = columns[name][i]
    values = upcast(kind, version, values)
    if "version_spans" in values:
        values["version_spans"] = tuple(VersionSpan(**s) for s in values["version_spans"] or ())
    if kind in MAY_REFER and '"$body"' in extra:
        values |= {name: resolve(values[name], body) for name in MAY_REFER[kind]}
    return record_type(**values)


def _numpy_lists(column: pa.ListArray) -> list[Any]:
    """One numpy view per row (None where null), sharing the batch's memory."""
    flat = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]


def refers(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Which rows of the batch refer to bodies."""
    may = pc.is_in(batch.column("kind"), pa.array(list(MAY_REFER)))
    return pc.and_(may, pc.match_substring(batch.column("extra"), '"$body"'))


def inline_bodies(batch: pa.RecordBatch, body: Body) -> pa.RecordBatch:
    """The batch with every reference to a body replaced, for readers that do not have the segment.

    Raises:
        CorruptionError: a body is missing.
    """
    column = batch.column("extra")
    kinds = batch.column("kind")
    referring = refers(batch)
    if not pc.any(referring).as_py():
        return batch
    texts = column.to_pylist()
    for i in np.flatnonzero(referring.to_numpy(zero_copy_only=False)):
        values = orjson.loads(texts[i])
        names = MAY_REFER[kinds[int(i)].as_py()]
        values |= {name: resolve(values[name], body) for name in names if name in values}
        texts[i] = orjson.dumps(values).decode()
    return batch.set_column(batch.schema.get_field_index("extra"), "extra", pa.array(texts, pa.string()))


assert set(ENVELOPE) | set(HOT) == set(LOG_SCHEMA.names)
assert ("event_id", "kind", "schema_version", "time", "run", *HOT, "extra") == ROW_NAMES

# The first array that pyarrow makes in a process makes it look for pandas, and import it: now, not while
# somebody waits for an append or a poll.
pa.array([], pa.int8())
