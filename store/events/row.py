"""An event as a row: its values in the order of `schema.LOG_SCHEMA` without `seq`. Pure.

`extra` is JSON bytes. What is checked here is that a value is stored as itself or refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import index
from typing import Any

import numpy as np
import orjson

from rollbook.store.events import RECORDS, Event
from rollbook.store.events.schema import ENVELOPE, HOT, LOG_SCHEMA
from rollbook.store.events.upcast import version_of

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
    """The value, which is an integer or None.

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


assert set(ENVELOPE) | set(HOT) == set(LOG_SCHEMA.names)
assert ("event_id", "kind", "schema_version", "time", "run", *HOT, "extra") == ROW_NAMES
