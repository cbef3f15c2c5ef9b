"""Export as a folder that Hugging Face `datasets.load_dataset` can read directly.

It has `data/SPLIT-00000-of-0000N.parquet`, and a README.md whose front matter names the splits
and columns. It is written without that library. One row per root-to-leaf path, as in the JSONL
export, but typed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from rollbook.store.cut import format_cut
from rollbook.store.errors import InterchangeError
from rollbook.store.events import Json
from rollbook.store.events.schema import SPAN
from rollbook.store.interchange.paths import PathRow, paths
from rollbook.store.interchange.selection import TrajectorySet, trajectories
from rollbook.store.interchange.tables import IDS, TEXTS, RowWriter, json_text

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


def export_dataset(selection: TrajectorySet, folder: Path, advance: Callable[[int], Any]) -> dict[str, int]:
    """Write the folder's files; how many trajectories and paths.

    In memory: what `trajectories` holds, and a row group of each split.

    Raises:
        InterchangeError: there is no path, and `load_dataset` reads no dataset without a row.
        CorruptionError: acknowledged bytes are damaged.
    """
    data = folder / "data"
    data.mkdir()
    count = 0
    splits: dict[str, _SplitWriter] = {}
    with ExitStack() as stack:
        for trajectory in trajectories(selection, advance):
            count += 1
            split = trajectory.split
            for path in paths(trajectory):
                if split not in splits:
                    splits[split] = stack.enter_context(_SplitWriter(data, split))
                splits[split].add(as_row(path))
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


class _SplitWriter:
    """The Parquet files of one split. Their number is known only at the end, so they are named then."""

    def __init__(self, folder: Path, split: str) -> None:
        self.rows = self.bytes = 0
        self._folder, self._split = folder, split
        self._shards: list[Path] = []
        self._writer = self._open()

    def _open(self) -> RowWriter:
        self._shards.append(self._folder / f"{self._split}-{len(self._shards):05d}.partial")
        return RowWriter(self._shards[-1], ROWS)

    def add(self, row: Json) -> None:
        if self._writer.bytes > SHARD_BYTES:
            self._writer.close()
            self._writer = self._open()
        self._writer.add(row)
        self.rows += 1

    def __enter__(self) -> _SplitWriter:
        return self

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
