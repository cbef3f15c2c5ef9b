"""Exports a store, or part of it, as files.

JSONL has a line per root-to-leaf path, an OpenAI-style chat with the tokens beside it.

Export as a folder that Hugging Face `datasets.load_dataset` can read directly.

It has `data/SPLIT-00000-of-0000N.parquet`, and a README.md whose front matter names the splits
and columns. It is written without that library. One row per root-to-leaf path, as in the JSONL
export, but typed.

Export as tables: trajectories, turns, rewards and events, one Parquet file each.

`trajectories`, `rewards` and `events` are the SQL views of these names, with their columns. `turns` has the
view's scalars and, from a fold of the events, each turn's whole prompt and messages.

Rows are written a group at a time.

What trajectories become is rendered here or by workers of Ray, and written here: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.cut import format_cut
from rollbook.store.errors import InterchangeError
from rollbook.store.events import Json
from rollbook.store.events.schema import SPAN
from rollbook.store.fold.path_tokens import PathTokens
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.interchange.destination import Progress, destination, no_progress
from rollbook.store.interchange.paths import PathRow, paths, span_rows
from rollbook.store.interchange.selection import (
    TrajectorySet,
    count_events,
    in_that_order,
    select,
    trajectories,
)
from rollbook.store.open import open_store
from rollbook.store.sql.sandbox import Connection
from rollbook.store.workers import HERE, Workers, made_of_trajectories, sliced, spread, store_there

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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that some trajectories became, and the weight of each."""

    rows: pa.RecordBatch
    weights: list[int]

    @classmethod
    def of(cls, rows: list[Json], schema: pa.Schema) -> Rows:
        """Rows by their columns; lists may be numpy arrays."""
        return cls(pa.RecordBatch.from_pylist(rows, schema=schema), [weight(row) for row in rows])

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Each row by itself, with its weight."""
        return ((self.rows.slice(i, 1), own) for i, own in enumerate(self.weights))


def export_tables(selection: TrajectorySet, folder: Path, turns: Iterator[Rows]) -> dict[str, int]:
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
            for name, where in (
                ("trajectories", f"{chosen} ORDER BY trajectory_id"),
                ("rewards", f"{chosen} ORDER BY lane, seq"),
                ("events", events),
            )
        }
    with RowWriter(folder / "turns.parquet", TURNS) as writer:
        for part in turns:
            for row, own in part:
                writer.add(row, own)
    return counts | {"turns": writer.rows}


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


def turns_of(trajectories: list[Trajectory]) -> Rows:
    """The turns' rows of trajectories."""
    return Rows.of([row for trajectory in trajectories for row in turn_rows(trajectory)], TURNS)


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


class RowWriter(AbstractContextManager["RowWriter"]):
    """Writes rows to one Parquet file; holds no more than a row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._sink = pa.OSFile(str(path), "wb")
        self._writer: Any = pq.ParquetWriter(self._sink, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._weight = 0

    def add(self, row: pa.RecordBatch, own: int) -> None:
        """Take one row, and its weight."""
        self._waiting.append(row)
        self._weight += own
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
        # In one piece, so that pages end where they would have ended however the rows came.
        [group] = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()
        self._writer.write_batch(group)
        self._waiting, self._weight = [], 0

    def __exit__(self, *_: object) -> None:
        self.close()


def weight(value: Any) -> int:
    """About how many array elements and characters a value holds."""
    if isinstance(value, dict):
        return sum(map(weight, value.values()))
    if isinstance(value, list):
        return sum(map(weight, value))
    return len(value) if hasattr(value, "__len__") else 1


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines that some trajectories became."""

    trajectories: int
    paths: int
    text: bytes


def lines_of(trajectories: list[Trajectory]) -> Lines:
    """A line for every path of trajectories."""
    lines = [orjson.dumps(as_json(path)) + b"\n" for trajectory in trajectories for path in paths(trajectory)]
    return Lines(len(trajectories), len(lines), b"".join(lines))


def export_jsonl(_: TrajectorySet, file: Path, lines: Iterator[Lines]) -> dict[str, int]:
    """Write the lines of the selected trajectories; how many of both."""
    counts = {"trajectories": 0, "paths": 0}
    with file.open("wb") as out:
        for part in lines:
            out.write(part.text)
            counts["trajectories"] += part.trajectories
            counts["paths"] += part.paths
    return counts


def as_json(path: PathRow) -> Json:
    """The path as plain JSON values. NaN and a version of -1 become null; `tools` and
    `chat_template_kwargs` are there if sent.

    A float32 is written as the float64 of the same value, so that it reads back to the same
    bits.
    """
    sent = {} if path.tools is None else {"tools": path.tools}
    if path.template_kwargs:
        sent["chat_template_kwargs"] = path.template_kwargs
    turns = [
        row | {"completion_ids": row["completion_ids"].tolist(), "logprobs": _floats(row["logprobs"])}
        for row in path.turn_rows()
    ]
    return {"messages": path.messages, **sent, **path.head(), "turns": turns, "tokens": _tokens(path.tokens)}


def _tokens(tokens: PathTokens) -> Json:
    return {
        "input_ids": tokens.tokens.tolist(),
        "loss_mask": tokens.loss_mask.astype(int).tolist(),
        "logprobs": _floats(tokens.logprobs),
        "versions": [None if version < 0 else version for version in tokens.versions.tolist()],
    }


def _floats(values: np.ndarray[Any, np.dtype[np.float32]] | None) -> list[float | None] | None:
    """float64 of the same value each; null for values that JSON has no number for (NaN: none was given)."""
    if values is None:
        return None
    return [value if isfinite(value) else None for value in values.tolist()]


SHARD_BYTES = 256 << 20
"""A Parquet file of a split that has grown beyond this is closed, and the next one begun."""

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
LOGPROBS = pa.list_(pa.float32())
TURN = pa.struct(
    [
        ("turn_id", pa.string()),
        ("message", pa.int32()),
        ("reward", pa.float64()),
        ("delivered", pa.string()),
        ("flags", TEXTS),
        ("prompt_length", pa.int32()),
        ("completion_ids", IDS),
        ("logprobs", LOGPROBS),
        ("version_spans", pa.list_(SPAN)),
    ]
)
ROWS = pa.schema(
    [
        ("trajectory", pa.string()),
        ("trajectory_id", pa.string()),
        ("run", pa.string()),
        ("group", pa.string()),
        ("task", pa.string()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("success", pa.bool_()),
        ("labels", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("messages_json", pa.string()),
        ("tools", pa.string()),
        ("chat_template_kwargs", pa.string()),
        ("turns", pa.list_(TURN)),
        ("input_ids", IDS),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", LOGPROBS),
        ("versions", IDS),
    ]
)
"""Columns. `messages` holds role and text, `messages_json` all of what was sent; `labels`, `tools` and
`chat_template_kwargs`: JSON."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows that some trajectories became, by split, in the order of their first ones."""

    trajectories: int
    rows: dict[str, Rows]


def splits_of(trajectories: list[Trajectory]) -> SplitRows:
    """A row for every path of trajectories."""
    rows: dict[str, list[Json]] = {}
    for trajectory in trajectories:
        for path in paths(trajectory):
            rows.setdefault(trajectory.split, []).append(as_row(path))
    return SplitRows(len(trajectories), {split: Rows.of(own, ROWS) for split, own in rows.items()})


def export_dataset(selection: TrajectorySet, folder: Path, parts: Iterator[SplitRows]) -> dict[str, int]:
    """Write the folder's files; how many trajectories and paths.

    In memory: a row group of each split.

    Raises:
        InterchangeError: there is no path, and `load_dataset` reads no dataset without a row.
    """
    data = folder / "data"
    data.mkdir()
    count = 0
    splits: dict[str, _SplitWriter] = {}
    with ExitStack() as stack:
        for part in parts:
            count += part.trajectories
            for split, rows in part.rows.items():
                if split not in splits:
                    splits[split] = stack.enter_context(_SplitWriter(data, split))
                for row, own in rows:
                    splits[split].add(row, own)
    if not splits:
        raise InterchangeError(
            f"none of the {count} trajectories at {format_cut(selection.cut)} has a completed turn, and a "
            "dataset without a row cannot be loaded: name a later cut, another run or split, or use parquet"
        )
    (folder / "README.md").write_text(_card(selection, splits, count), encoding="utf-8")
    return {"trajectories": count, "paths": sum(split.rows for split in splits.values())}


def as_row(path: PathRow) -> Json:
    """The path in the columns `ROWS`. NaN and -1 stay, so that lists hold numbers only."""
    head = path.head()
    return {
        **{name: head[name] for name in ROWS.names if name in head},
        "labels": json_text(head["labels"]),
        "messages": [{"role": m.get("role"), "content": text_of(m.get("content"))} for m in path.messages],
        "messages_json": json_text(path.messages),
        "tools": None if path.tools is None else json_text(path.tools),
        "chat_template_kwargs": json_text(path.template_kwargs) if path.template_kwargs else None,
        "turns": path.turn_rows(),
        "input_ids": path.tokens.tokens,
        "loss_mask": path.tokens.loss_mask,
        "logprobs": path.tokens.logprobs,
        "versions": path.tokens.versions,
    }


def text_of(content: Any) -> str | None:
    """The text of a message's content: as sent, or its text parts joined; None where there is no text."""
    if isinstance(content, str) or content is None:
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
    return "".join(texts) if texts else None


class _SplitWriter(AbstractContextManager["_SplitWriter"]):
    """The Parquet files of one split. Their number is known only at the end, so they are named then."""

    def __init__(self, folder: Path, split: str) -> None:
        self.rows = self.bytes = 0
        self._folder, self._split = folder, split
        self._shards: list[Path] = []
        self._writer = self._open()

    def _open(self) -> RowWriter:
        self._shards.append(self._folder / f"{self._split}-{len(self._shards):05d}.partial")
        return RowWriter(self._shards[-1], ROWS)

    def add(self, row: pa.RecordBatch, own: int) -> None:
        if self._writer.bytes > SHARD_BYTES:
            self._writer.close()
            self._writer = self._open()
        self._writer.add(row, own)
        self.rows += 1

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        for number, shard in enumerate(self._shards):
            self.bytes += shard.stat().st_size
            shard.rename(self._folder / f"{self._split}-{number:05d}-of-{len(self._shards):05d}.parquet")


def _card(selection: TrajectorySet, splits: dict[str, _SplitWriter], trajectories: int) -> str:
    """The README: front matter (each value as JSON, which YAML reads too), then a few words."""
    size = sum(split.bytes for split in splits.values())
    files = [{"split": name, "path": f"data/{name}-*"} for name in splits]
    info = {
        "features": [_feature(field) for field in ROWS],
        "splits": [
            {"name": name, "num_bytes": split.bytes, "num_examples": split.rows}
            for name, split in splits.items()
        ],
        "download_size": size,
        "dataset_size": size,
    }
    matter = {"configs": [{"config_name": "default", "data_files": files}], "dataset_info": info}
    lines = [f"{key}: {orjson.dumps(value).decode()}" for key, value in matter.items()]
    rows = sum(split.rows for split in splits.values())
    return "\n".join(
        [
            "---",
            *lines,
            "---",
            "",
            "# Agent rollouts",
            "",
            f"{rows} root-to-leaf paths of {trajectories} trajectories, exported by Rollbook",
            f"from store {selection.store.store_id} at the cut `{format_cut(selection.cut)}`.",
            "`messages_json` is exactly what was sent and answered; `messages` is its text.",
            "`loss_mask`, `logprobs` and `versions` belong to `input_ids`, one for one.",
            "",
        ]
    )


def _feature(field: pa.Field) -> Json:
    """A column as the library writes it into front matter."""
    return {"name": field.name, **_type(field.type)}


def _type(type_: pa.DataType) -> Json:
    if pa.types.is_list(type_):
        item = type_.value_type
        return {"list": _members(item) if pa.types.is_struct(item) else _type(item)["dtype"]}
    names = {pa.string(): "string", pa.bool_(): "bool", pa.float32(): "float32", pa.float64(): "float64"}
    return {"dtype": names.get(type_, str(type_))}


def _members(struct: pa.StructType) -> list[Json]:
    return [_feature(struct.field(i)) for i in range(struct.num_fields)]


Render = Callable[[list[Trajectory]], Any]
"""What trajectories become."""
Exporter = Callable[[TrajectorySet, Path, Iterator[Any]], dict[str, int]]
"""Writes that of all, in order."""

FORMATS: dict[str, tuple[Render, Exporter, bool]] = {
    "parquet": (turns_of, export_tables, True),
    "jsonl": (lines_of, export_jsonl, False),
    "datasets": (splits_of, export_dataset, True),
}
"""Format -> what renders it, what writes it, and whether into a folder."""


def export_store(
    store: Path,
    out: Path,
    format_: str,
    *,
    as_of: str = "head",
    run: str | None = None,
    split: str | None = None,
    progress: Progress = no_progress,
    workers: Workers = HERE,
) -> dict[str, Any]:
    """Write the trajectories at a cut, of one run or split if given, to `out`; what was written.

    In memory: what `trajectories` holds, or results of workers; and a row group.

    Args:
        format_: parquet, jsonl or datasets.

    Raises:
        NotAStoreError, CutError, CorruptionError: as `store.open` and `Store.cut`.
        InterchangeError: `out` exists or cannot be written, or the run has no trajectory.
    """
    render, exporter, folder = FORMATS[format_]
    log = open_store(store)
    with destination(out, folder=folder) as temporary:
        selection = select(log, as_of, run, split)
        with (
            progress(f"export {format_}", count_events(selection)) as advance,
            _rendered(selection, render, advance, workers) as parts,
        ):
            rows = exporter(selection, temporary, parts)
    return {"to": str(out), "format": format_, "cut": format_cut(selection.cut), "rows": rows}


@contextmanager
def _rendered(
    selection: TrajectorySet,
    render: Render,
    advance: Callable[[int], Any],
    workers: Workers,
) -> Iterator[Iterator[Any]]:
    """Context: what the selected trajectories become, in the order of `trajectories`."""
    if not workers.count:
        yield (render([trajectory]) for trajectory in trajectories(selection, advance))
        return
    events = in_that_order(selection)
    slices = [*sliced([*events])]
    store = store_there(selection.store, selection.cut, workers)

    def told(parts: Iterator[Any]) -> Iterator[Any]:
        for ids, part in zip(slices, parts, strict=True):
            advance(sum(events[trajectory_id] for trajectory_id in ids))
            yield part

    with spread(partial(made_of_trajectories, store, render), workers) as results:
        yield told(results(slices))
