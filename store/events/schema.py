"""The one column specification: Arrow schemas, the codec and the SQL documentation come from it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


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
