"""Export as tables: trajectories, turns, rewards and events, one Parquet file each.

`trajectories`, `rewards` and `events` are the SQL views of these names, with their columns. `turns` has the
view's scalars and, from a fold of the events, each turn's whole prompt and messages.

Rows are written a group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.events import Json
from rollbook.store.events.schema import SPAN
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.interchange.paths import span_rows
from rollbook.store.interchange.selection import TrajectorySet, trajectories
from rollbook.store.sql.sandbox import Connection

BATCH_ROWS = 2048
TEXTS = pa.list_(pa.string())
IDS = pa.list_(pa.int32())

TURNS = pa.schema(
    [
        ("run", pa.string()),
        ("trajectory", pa.string()),
        ("trajectory_id", pa.string()),
        ("split", pa.string()),
        ("turn_id", pa.string()),
        ("position", pa.int32()),
        ("parent_turn_id", pa.string()),
        ("root_reason", pa.string()),
        ("request_id", pa.string()),
        ("status", pa.string()),
        ("delivered", pa.string()),
        ("error", pa.string()),
        ("policy", pa.string()),
        ("policy_version", pa.int64()),
        ("version_spans", pa.list_(SPAN)),
        ("prompt_ids", IDS),
        ("prompt_delta", IDS),
        ("prompt_length", pa.int64()),
        ("completion_ids", IDS),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("messages", pa.string()),
        ("reply", pa.string()),
        ("request", pa.string()),
        ("requested_model", pa.string()),
        ("sampling", pa.string()),
        ("honoured", pa.string()),
        ("logprob_semantics", pa.string()),
        ("flags", TEXTS),
        ("timings", pa.string()),
        ("reward", pa.float64()),
    ]
)
"""Columns of the turns' file. Text that the log holds as JSON is JSON text."""


def export_tables(selection: TrajectorySet, folder: Path, advance: Callable[[int], Any]) -> dict[str, int]:
    """Write the four files into a folder that exists; the number of rows of each.

    `events` has the log's own rows, also those of no trajectory (runs, steps), unless a split is selected.
    In memory: what `trajectories` holds, a row group of turns, and a batch of 2,048 rows of the others;
    DuckDB's joins for `trajectories` and `rewards` hold their keys.

    Raises:
        CorruptionError: acknowledged bytes are damaged.
    """
    chosen = f"trajectory_id IN ({selection.sql()})"
    events = "true"
    if selection.split is not None:
        events = chosen
    elif selection.run is not None:
        events = "run = $run"
    with selection.connect() as connection:
        counts = {
            name: _write_view(connection, name, where, selection.parameters, folder / f"{name}.parquet")
            for name, where in (("trajectories", chosen), ("rewards", chosen), ("events", events))
        }
    counts["turns"] = _write_turns(selection, folder / "turns.parquet", advance)
    return counts


def _write_view(connection: Connection, view: str, where: str, parameters: dict[str, str], path: Path) -> int:
    used = {name: value for name, value in parameters.items() if f"${name}" in where}
    relation = connection.sql(f'SELECT * FROM "{view}" WHERE {where}', params=used)
    rows = 0
    reader = relation.to_arrow_reader(BATCH_ROWS)
    with pq.ParquetWriter(str(path), reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _write_turns(selection: TrajectorySet, path: Path, advance: Callable[[int], Any]) -> int:
    with RowWriter(path, TURNS) as writer:
        for trajectory in trajectories(selection, advance):
            for row in turn_rows(trajectory):
                writer.add(row)
        return writer.rows


def turn_rows(trajectory: Trajectory) -> Iterator[Json]:
    """A row in the columns `TURNS` for each turn, also those that failed or still run.

    Raises:
        CorruptionError: a prompt does not fold to the ids that were sent.
    """
    for turn in trajectory.turns.values():
        yield _request_columns(trajectory, turn) | _completion_columns(trajectory, turn)


def _request_columns(trajectory: Trajectory, turn: Turn) -> Json:
    requested = turn.requested
    status = "completed" if turn.completed else "failed" if turn.failed else "running"
    return {
        "run": trajectory.run,
        "trajectory": trajectory.opened.name,
        "trajectory_id": trajectory.opened.trajectory_id,
        "split": trajectory.split,
        "turn_id": turn.turn_id,
        "position": turn.position,
        "parent_turn_id": requested.parent_turn_id,
        "root_reason": requested.root_reason,
        "request_id": requested.request_id,
        "status": status,
        "delivered": turn.delivered,
        "error": turn.failed.error if turn.failed else None,
        "messages": json_text(trajectory.messages(turn)),
        "request": json_text(requested.request),
        "requested_model": requested.requested_model,
        "sampling": json_text(requested.sampling),
        "honoured": json_text(requested.honoured),
        "reward": trajectory.reward(turn_id=turn.turn_id),
    }


def _completion_columns(trajectory: Trajectory, turn: Turn) -> Json:
    done = turn.completed
    if done is None:
        return {}
    return {
        "policy": done.policy,
        "policy_version": done.policy_version,
        "version_spans": span_rows(done.version_spans),
        "prompt_ids": trajectory.prompt_ids(turn),
        "prompt_delta": done.prompt_ids,
        "prompt_length": done.prompt_length,
        "completion_ids": done.completion_ids,
        "logprobs": done.logprobs,
        "finish_reason": done.finish_reason,
        "reply": json_text(done.reply),
        "logprob_semantics": json_text(done.logprob_semantics),
        "flags": done.flags,
        "timings": json_text(done.timings),
    }


def json_text(value: Any) -> str:
    """The value as JSON text."""
    return orjson.dumps(value).decode()


GROUP_ROWS = 1024
GROUP_WEIGHT = 4 << 20
"""A row group is written when its rows hold about this many array elements and characters."""


class RowWriter:
    """Writes rows (column -> value) to one Parquet file; holds no more than a row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._schema = schema
        self._sink = pa.OSFile(str(path), "wb")
        self._writer: Any = pq.ParquetWriter(self._sink, schema, compression="zstd")
        self._waiting: list[Json] = []
        self._weight = 0

    def add(self, row: Json) -> None:
        """Take one row. Lists may be numpy arrays."""
        self._waiting.append(row)
        self._weight += weight(row)
        self.rows += 1
        if len(self._waiting) >= GROUP_ROWS or self._weight >= GROUP_WEIGHT:
            self._write_group()

    @property
    def bytes(self) -> int:
        """Size of the file so far, without the rows that wait."""
        return int(self._sink.tell())

    def close(self) -> None:
        """Write what waits, and the file's footer."""
        if self._waiting:
            self._write_group()
        self._writer.close()
        self._sink.close()

    def _write_group(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._waiting, schema=self._schema))
        self._waiting, self._weight = [], 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def weight(value: Any) -> int:
    """About how many array elements and characters a value holds."""
    if isinstance(value, dict):
        return sum(map(weight, value.values()))
    if isinstance(value, list):
        return sum(map(weight, value))
    return len(value) if hasattr(value, "__len__") else 1
