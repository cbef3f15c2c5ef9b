"""Decodes Arrow record batches, also those of older releases, into events with the bodies they refer to.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from rollbook.store.events.schema import ARRAYS, LOG_SCHEMA, hot_fields
from rollbook.store.events.upcast import upcast, version_of

__all__ = [
    "as_json",
    "conform",
    "decode",
    "from_json",
    "inline_bodies",
    "refers",
]

Body = Callable[[str], Any]
"""Digest -> the body that a request or a completion refers to."""

MAY_REFER = {kind: about(kind).large for kind in kinds_where(lambda properties: properties.large)}
"""Kind -> its fields that may hold references to bodies."""


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of an older release in this release's columns; columns that it lacks are null.

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
        index = batch.schema.get_field_index(f.name)
        if index >= 0 and batch.schema.field(index).type != f.type:
            raise FormatError(f"column {f.name!r} has type {batch.schema.field(index).type}, not {f.type}")
        arrays.append(batch.column(index) if index >= 0 else pa.nulls(batch.num_rows, f.type))
    return pa.record_batch(arrays, schema=LOG_SCHEMA)


def no_body(digest: str) -> Any:
    """The `Body` of a place without bodies.

    Raises:
        CorruptionError: always.
    """
    raise CorruptionError(f"a turn refers to body {digest}, which its segment does not hold")


def decode(batch: pa.RecordBatch, lane: str, body: Body = no_body) -> Iterator[Event]:
    """The batch's events, in order. References to bodies are replaced by the values that `body` returns.

    Raises:
        FormatError: a kind or schema version this release does not know.
        CorruptionError: a body is missing, or a record is none of its kind.
    """
    # `time` is read as integers below: a Python datetime cannot hold every value of the column.
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
    for name in hot_fields(kind):
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
