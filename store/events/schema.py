"""The one column specification, and an event as a row of it.

Arrow schemas, the codec and the SQL documentation come from `COLUMNS`.

A row has an event's values in the order of `LOG_SCHEMA` without `seq`.

`extra` is JSON bytes. A value is stored as itself or refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import index
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rollbook.store.events import RECORDS, Event
from rollbook.store.events.upcast import version_of


@dataclass(frozen=True, slots=True)
class Column:
    """One typed column of the log: its name, Arrow type and meaning."""

    name: str
    type: pa.DataType
    doc: str


SPAN = pa.struct(
    [
        pa.field("policy", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("start", pa.int32()),
        pa.field("end", pa.int32()),
    ]
)

COLUMNS: tuple[Column, ...] = (
    Column("seq", pa.int64(), "position in the lane, from 0, without gaps"),
    Column("event_id", pa.string(), "UUIDv7 made by the writer"),
    Column("kind", pa.string(), "what happened; see the kinds of events"),
    Column("schema_version", pa.int16(), "version of the kind's record"),
    Column("time", pa.timestamp("us"), "wall clock of the writer, UTC; data, never an order"),
    Column("run", pa.string(), "the run the event belongs to"),
    Column("trajectory_id", pa.string(), "UUIDv7 of the trajectory"),
    Column("turn_id", pa.string(), "UUIDv7 of the turn"),
    Column("policy", pa.string(), "named line of weights, by default actor"),
    Column("policy_version", pa.int64(), "optimizer steps taken within (run, policy)"),
    Column("step", pa.int64(), "optimizer step"),
    Column("reward", pa.float64(), "reward of a trajectory or turn"),
    Column("prompt_ids", pa.list_(pa.int32()), "prompt token ids not held by the parent turn"),
    Column("completion_ids", pa.list_(pa.int32()), "sampled token ids"),
    Column("logprobs", pa.list_(pa.float32()), "natural-log probability of each sampled token"),
    Column("version_spans", pa.list_(SPAN), "which policy version made which completion tokens"),
    Column("extra", pa.string(), "the record's other fields, as one JSON object"),
)

LOG_SCHEMA = pa.schema([pa.field(column.name, column.type) for column in COLUMNS])
"""Schema of a lane's record batches. The lane is the file's, so it is no column of the file."""

ENVELOPE = ("seq", "event_id", "kind", "schema_version", "time", "run", "extra")
REQUIRED = ("event_id", "kind", "schema_version", "time", "run", "extra")
"""Columns that are never null, beside `seq`."""
HOT = tuple(column.name for column in COLUMNS if column.name not in ENVELOPE)
"""Record fields that are typed columns."""


Row = tuple[Any, ...]
ROW_NAMES = tuple(LOG_SCHEMA.names[1:])
ARRAYS = {
    name: np.dtype(t) for name, t in (("prompt_ids", "i4"), ("completion_ids", "i4"), ("logprobs", "f4"))
}
"""Columns of arrays, and what the arrays hold."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """How a kind's record becomes a row.

    Attributes:
        version: of the records that are written.
        hot: for each column of `HOT`, the field that it holds, or None.
        columns: the fields that are columns.
        extra: fields that are in no column.
        owned: whether it is always a trajectory's; the views go by that.
    """

    version: int
    hot: tuple[str | None, ...]
    columns: tuple[str, ...]
    extra: tuple[str, ...]
    owned: bool


def _fields_of(kind: str, record_type: type[Any]) -> _Fields:
    types = {field.name: str(field.type) for field in fields(record_type)}
    return _Fields(
        version_of(kind),
        tuple(name if name in types else None for name in HOT),
        tuple(name for name in HOT if name in types),
        tuple(name for name in types if name not in HOT),
        types.get("trajectory_id") == "str",
    )


_FIELDS = {kind: _fields_of(kind, record_type) for kind, record_type in RECORDS.items()}


def hot_fields(kind: str) -> tuple[str, ...]:
    """The fields of a kind's record that are columns."""
    return _FIELDS[kind].columns


def row_of(event: Event) -> Row:
    """The event as a row.

    Raises:
        TypeError: a value has no JSON form, or an id is missing.
    """
    record: Any = event.record
    known = _FIELDS[record.KIND]
    if known.owned and record.trajectory_id is None:
        raise TypeError(f"a {record.KIND} has no trajectory_id")
    hot = [None if name is None else getattr(record, name) for name in known.hot]
    extra = orjson.dumps({name: getattr(record, name) for name in known.extra})
    return (event.event_id, record.KIND, known.version, event.time_us, event.run, *hot, extra)


def whole(value: Any) -> int | None:
    """The value, which must be an integer or None.

    Raises:
        TypeError: it is something else.
    """
    return None if value is None else index(value)


def real(value: Any) -> float | None:
    """The value as the float64 that is stored for it, or None.

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
    """Values as the one-dimensional array that is stored for them; token ids keep their value.

    Raises:
        ValueError: they are no list of numbers, or an integer among them does not fit.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"a list of numbers has one dimension, this has {array.ndim}")
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in ("iu" if np.dtype(dtype).kind == "i" else "iuf"):
        raise ValueError(f"an array of {array.dtype} cannot be stored as {np.dtype(dtype)}")
    stored = array.astype(dtype)
    if stored.dtype.kind == "i" and not np.array_equal(stored, array):
        raise ValueError(f"an integer does not fit into {stored.dtype}")
    return stored


assert set(ENVELOPE) | set(HOT) == set(LOG_SCHEMA.names)
assert ("event_id", "kind", "schema_version", "time", "run", *HOT, "extra") == ROW_NAMES
