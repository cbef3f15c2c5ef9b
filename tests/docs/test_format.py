"""docs/format.md says what the code writes: columns, kinds of events, and where each header field lies."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollbook.store import Store
from rollbook.store.events import RECORDS
from rollbook.store.lane.frame import EMPTY_CHAIN, FORMAT_VERSION, next_chain, read_frame, scan
from rollbook.store.schema import COLUMNS, HOT, LOG_SCHEMA, SCHEMA_VERSION


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of docs/format.md."""
    return (root / "docs" / "format.md").read_text()


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _table(page: str, head: str) -> list[str]:
    """Rows of the table with this head, rule left out."""
    _, _, rest = page.partition(head + "\n")
    return rest.partition("\n\n")[0].splitlines()[1:]


def test_the_versions(page: str) -> None:
    """The page is about the format and schema version that this release writes."""
    assert page.startswith(f"# Format {FORMAT_VERSION}:")
    assert f"Every kind's `schema_version` is {SCHEMA_VERSION}." in page


def test_the_columns(page: str) -> None:
    """The table of columns is store.schema.COLUMNS, in order."""
    rows = [f"| `{c.name}` | `{c.type}` | {c.doc} |" for c in COLUMNS]
    assert _table(page, "| column | Arrow type | meaning |") == rows


def test_the_kinds(page: str) -> None:
    """Every kind is listed with the fields that are columns and those in `extra`."""
    rows = []
    for kind, record in RECORDS.items():
        names = [f.name for f in fields(record)]
        columns, extra = [n for n in names if n in HOT], [n for n in names if n not in HOT]
        rows.append(f"| `{kind}` | {_codes(columns)} | {_codes(extra)} |")
    assert _table(page, "| kind | columns used | keys of `extra` |") == rows


def test_the_frame_header(page: str, one_of_everything: Store) -> None:
    """Read at the documented offsets and sizes, a header's fields are those that the code reads."""
    segment = one_of_everything.path / "lanes" / "serve" / "00000001.wal"
    data = segment.read_bytes()
    frames = list(scan(memoryview(data), 0, len(data), EMPTY_CHAIN))
    assert [f.kind for f in frames] == [0, 1]
    rows = [row.strip("| ").split(" | ") for row in _table(page, "| offset | bytes | field |")]
    assert rows[-1][0] == "24", "the first table of offsets is the watermark's"
    rest = page.split("## Frames")[1]
    rows = [row.strip("| ").split(" | ") for row in _table(rest, "| offset | bytes | field |")]
    assert sum(int(size) for _, size, _ in rows) == 64
    frame, header = frames[1], data[frames[1].offset : frames[1].offset + 64]
    found: list[Any] = [header[int(at) : int(at) + int(size)] for at, size, _ in rows]
    wanted = (
        b"RBLF",
        struct.pack("<H", 0),
        struct.pack("<H", frame.kind),
        struct.pack("<I", len(frame.payload)),
    )
    assert tuple(found[:4]) == wanted
    assert found[5:] == [
        struct.pack("<Q", 0),
        struct.pack("<I", frame.count),
        bytes(4),
        frame.chain,
        bytes(16),
    ]
    assert next_chain(frames[0].chain, frame.payload) == frame.chain


def test_the_header_frame(one_of_everything: Store) -> None:
    """A segment's first payload is the schema, with the lane, segment and store as metadata."""
    data = (one_of_everything.path / "lanes" / "train" / "00000001.wal").read_bytes()
    schema = pa.ipc.read_schema(pa.py_buffer(read_frame(memoryview(data), 0).payload))
    assert schema.equals(LOG_SCHEMA)
    store_id = one_of_everything.store_id.encode()
    assert schema.metadata == {b"lane": b"train", b"segment": b"1", b"store": store_id}
