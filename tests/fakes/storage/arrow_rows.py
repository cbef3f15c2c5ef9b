"""Rows as a batch by pyarrow's own constructors: what the encoder that is made by hand must come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rollbook.store.events.schema import ARRAYS, LOG_SCHEMA, ROW_NAMES, Row, stored_array, whole


def by_pyarrow(rows: Sequence[Row], first_seq: int) -> pa.RecordBatch:
    """The rows in `LOG_SCHEMA`; row i gets sequence number `first_seq + i`."""
    columns = dict(zip(ROW_NAMES, zip(*rows, strict=True), strict=True))
    columns |= {"seq": range(first_seq, first_seq + len(rows))}
    return pa.record_batch([_column(f, columns[f.name]) for f in LOG_SCHEMA], schema=LOG_SCHEMA)


def _column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    name = field.name
    if name in ARRAYS:
        values = [None if v is None else stored_array(v, ARRAYS[name]) for v in values]
    elif name == "version_spans":
        values = [None if v is None else [_span(s) for s in v] for v in values]
    elif name == "extra":
        values = [text.decode() for text in values]
    elif name == "time":
        return pa.array(values, pa.int64()).view(field.type)
    elif name in ("policy_version", "step"):
        values = [whole(v) for v in values]
    return pa.array(values, field.type)


def _span(span: Any) -> tuple[str, int | None, int | None, int | None]:
    return span.policy, whole(span.version), whole(span.start), whole(span.end)
