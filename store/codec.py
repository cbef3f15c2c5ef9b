"""Events <-> Arrow record batches. Pure: no file is touched here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rollbook.store.errors import FormatError
from rollbook.store.events import RECORDS, Event, VersionSpan
from rollbook.store.schema import ENVELOPE, HOT, LOG_SCHEMA, SCHEMA_VERSION, SPAN

_ARRAYS = {"prompt_ids": np.int32, "completion_ids": np.int32, "logprobs": np.float32}


def _field_names(record_type: type[Any]) -> tuple[frozenset[str], tuple[str, ...]]:
    """(fields that are typed columns, fields that go to `extra`)"""
    names = [f.name for f in fields(record_type)]
    return frozenset(n for n in names if n in HOT), tuple(n for n in names if n not in HOT)


_FIELDS = {kind: _field_names(record_type) for kind, record_type in RECORDS.items()}


def encode(events: Sequence[Event], first_seq: int) -> pa.RecordBatch:
    """One batch in `LOG_SCHEMA`; event i gets sequence number `first_seq + i`."""
    columns: dict[str, list[Any]] = {name: [] for name in HOT}
    extra: list[str] = []
    for event in events:
        hot, rest = _FIELDS[event.kind]
        for name, values in columns.items():
            values.append(getattr(event.record, name) if name in hot else None)
        extra.append(orjson.dumps({name: getattr(event.record, name) for name in rest}).decode())
    envelope: dict[str, Any] = {
        "seq": np.arange(first_seq, first_seq + len(events), dtype=np.int64),
        "event_id": [event.event_id for event in events],
        "kind": [event.kind for event in events],
        "schema_version": np.full(len(events), SCHEMA_VERSION, dtype=np.int16),
        "time": np.array([event.time_us for event in events], dtype=np.int64),
        "run": [event.run for event in events],
        "extra": extra,
    }
    return pa.record_batch(
        [_arrow(f.name, f.type, (envelope | columns)[f.name]) for f in LOG_SCHEMA],
        schema=LOG_SCHEMA,
    )


def _arrow(name: str, type_: pa.DataType, values: Any) -> pa.Array:
    if name in _ARRAYS:
        return _lists(values, type_.value_type, _ARRAYS[name])
    if name == "version_spans":
        values = [v and [{k: getattr(s, k) for k in SPAN.names} for s in v] for v in values]
    if name == "time":
        return pa.array(values).cast(type_)
    return pa.array(values, type_)


def _lists(values: list[Any], value_type: pa.DataType, dtype: Any) -> pa.Array:
    """A list column built from arrays without a Python object per token."""
    lengths = np.array([0 if v is None else len(v) for v in values], dtype=np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    present = [np.asarray(v, dtype=dtype) for v in values if v is not None]
    flat = np.concatenate(present) if present else np.empty(0, dtype)
    mask = np.array([v is None for v in values])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat, value_type), mask=pa.array(mask) if mask.any() else None
    )


def decode(batch: pa.RecordBatch, lane: str) -> Iterator[Event]:
    """The batch's events, in order.

    Raises:
        FormatError: a kind or schema version this release does not know.
    """
    # `time` is read as integers below: a Python datetime cannot hold all that the column can.
    plain = [name for name in LOG_SCHEMA.names if name not in _ARRAYS and name != "time"]
    rows = {name: batch.column(name).to_pylist() for name in plain}
    arrays = {name: _numpy_lists(batch.column(name)) for name in _ARRAYS}
    times = batch.column("time").cast(pa.int64()).to_pylist()
    for i in range(batch.num_rows):
        kind = rows["kind"][i]
        record_type = RECORDS.get(kind)
        if record_type is None or rows["schema_version"][i] > SCHEMA_VERSION:
            raise FormatError(
                f"event {rows['event_id'][i]} has kind {kind!r} version "
                f"{rows['schema_version'][i]}, which this release cannot read: update rollbook"
            )
        hot, _ = _FIELDS[kind]
        values = orjson.loads(rows["extra"][i])
        for name in hot:
            values[name] = arrays[name][i] if name in arrays else rows[name][i]
        if "version_spans" in hot:
            values["version_spans"] = tuple(VersionSpan(**s) for s in values["version_spans"] or ())
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


def as_json(event: Event) -> dict[str, Any]:
    """The whole event as plain JSON values, for people and for `--json`."""
    record = event.record
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = value.tolist()
        elif isinstance(value, tuple):
            values[name] = [{k: getattr(s, k) for k in SPAN.names} for s in value]
    head = {name: getattr(event, name) for name in ("lane", "seq", "event_id", "kind", "run")}
    return head | {"time_us": event.time_us} | values


assert set(ENVELOPE) | set(HOT) == set(LOG_SCHEMA.names)
