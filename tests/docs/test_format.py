"""docs/format.md says what the code writes: settings, columns, kinds of events, and where each field lies."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shutil
import struct
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fakes.stories.records import turn_completed

from rollbook import store as rb
from rollbook.store import Event, Store, settings
from rollbook.store.events import RECORDS, VersionSpan
from rollbook.store.events.schema import COLUMNS, HOT, LOG_SCHEMA, row_of
from rollbook.store.events.upcast import UPCASTERS, version_of
from rollbook.store.interchange import bundle
from rollbook.store.interchange.bundle import Bundle, Member
from rollbook.store.marker import FORMAT_VERSION
from rollbook.store.sealed.derived import DERIVED, KIND_SCHEMA, KINDS, LOCATION_SCHEMA, LOCATIONS
from rollbook.store.sealed.field_ids import COLUMN_IDS, SCALARS_IDS
from rollbook.store.sealed.names import NAMES
from rollbook.store.sealed.parquet import FAT_KINDS, MARKS_ROW_GROUP, TABLE_SCHEMA
from rollbook.store.sealed.projections import OUTLIER_BELOW
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import Erasure, SealedFile, SealedSegment, Unit, current_units, unit_folder
from rollbook.store.settings import SealSettings
from rollbook.store.wal.frame import EMPTY_CHAIN, FEW, encode_rows, next_chain, read_frame, scan


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of docs/format.md."""
    return (root / "docs" / "format.md").read_text()


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _table(page: str, head: str, after: str = "") -> list[str]:
    """Rows of the first table with this head behind the text `after`, rule left out."""
    _, _, rest = page.partition(after)[2].partition(head + "\n") if after else page.partition(head + "\n")
    assert rest, f"no table {head!r}"
    return rest.partition("\n\n")[0].splitlines()[1:]


def _cells(rows: list[str]) -> list[list[str]]:
    return [row.strip("| ").split(" | ") for row in rows]


def test_the_page_is_about_the_format_written(page: str) -> None:
    """The page is about the format that this release writes."""
    assert page.startswith(f"# Format {FORMAT_VERSION}:")
    assert "a store written in it opens for ever; newer formats are refused" in page


def test_every_setting_is_listed_with_its_default(page: str) -> None:
    """Every key of store.toml is listed with its default and what the code says of it."""
    tree = ast.parse(Path(settings.__file__).read_text())
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    rows = []
    for section, info in settings.StoreSettings.model_fields.items():
        body = classes[type(info.default).__name__]
        for at, node in enumerate(body):
            if isinstance(node, ast.AnnAssign):
                name, doc = ast.unparse(node.target), ast.literal_eval(body[at + 1].value)  # type: ignore[attr-defined]
                default = getattr(info.default, name)
                default = json.dumps(default) if isinstance(default, tuple) else default
                shown = "none" if default is None else f"`{default}`"
                rows.append(f"| `{section}` | `{name}` | {shown} | {' '.join(doc.split())} |")
    assert _table(page, "| section | key | default | meaning |") == rows


def test_the_columns_are_the_schemas(page: str) -> None:
    """The table of columns is store.schema.COLUMNS, in order."""
    rows = [f"| `{c.name}` | `{c.type}` | {c.doc} |" for c in COLUMNS]
    assert _table(page, "| column | Arrow type | meaning |") == rows


def test_every_kind_is_listed_with_its_version(page: str) -> None:
    """Every kind is listed with its version, the fields that are columns and those in `extra`."""
    rows = []
    for kind, record in RECORDS.items():
        names = [f.name for f in fields(record)]
        columns, extra = [n for n in names if n in HOT], [n for n in names if n not in HOT]
        rows.append(f"| `{kind}` | {version_of(kind)} | {_codes(columns)} | {_codes(extra)} |")
    assert _table(page, "| kind | version | columns used | keys of `extra` |") == rows


def test_columns_have_the_documented_numbers(page: str) -> None:
    """Those of the table, which say in what order, and of sealed files: they are given once and for ever."""
    numbers = _cells(_table(page, "| number | of |"))
    assert [row[0] for row in numbers] == ["1 to 18", "19, 20, 21", "22"]
    lists = [f"{name}.element" for name in re.findall(r"`(\w+)`", numbers[1][1])]
    spans = {f"version_spans.element.{n}": int(i) for i, n in re.findall(r"(\d+) `(\w+)`", numbers[2][1])}
    first = dict(zip(["lane", *LOG_SCHEMA.names, *lists, "version_spans.element"], range(1, 23), strict=True))
    assert first["extra"] == 18
    assert first | spans == COLUMN_IDS
    assert list(SCALARS_IDS.values()) == list(range(1, len(SCALARS_IDS) + 1))


def test_every_upcaster_is_described(page: str) -> None:
    """Every step from one version of a kind to the next is told."""
    described = [
        f"{kind}, {step}" for kind, step, _ in _cells(_table(page, "| kind | from | what is done |"))
    ]
    assert described == [f"`{kind}`, {version} to {version + 1}" for kind, version in UPCASTERS]


def test_a_frame_header_has_the_documented_layout(page: str, one_of_everything: Store) -> None:
    """Read at the documented offsets and sizes, a header's fields are those that the code reads."""
    segment = one_of_everything.path / "lanes" / "serve" / "00000001.wal"
    data = segment.read_bytes()
    frames = list(scan(memoryview(data), 0, len(data), EMPTY_CHAIN))
    assert [f.kind for f in frames] == [0, 1]
    assert [row[0] for row in _cells(_table(page, "| offset | bytes | field |"))] == ["0", "8", "16", "24"]
    rows = _cells(_table(page, "| offset | bytes | field |", "## Frames"))
    assert sum(int(size) for _, size, _ in rows) == 64
    frame, header = frames[1], data[frames[1].offset : frames[1].offset + 64]
    values: list[Any] = [header[int(at) : int(at) + int(size)] for at, size, _ in rows]
    wanted = (b"RBLF", struct.pack("<H", 1), struct.pack("<H", frame.kind))
    assert tuple(values[:4]) == (*wanted, struct.pack("<I", len(frame.payload)))
    rest = (struct.pack("<Q", 0), struct.pack("<I", frame.count), bytes(4), frame.chain, bytes(16))
    assert values[5:] == list(rest)
    assert next_chain(frames[0].chain, frame.payload) == frame.chain


def test_a_segments_first_frame_is_the_documented_header(one_of_everything: Store) -> None:
    """A segment's first payload is the schema, with the lane, segment and store as metadata."""
    data = (one_of_everything.path / "lanes" / "train" / "00000001.wal").read_bytes()
    schema = pa.ipc.read_schema(pa.py_buffer(read_frame(memoryview(data), 0).payload))
    assert schema.equals(LOG_SCHEMA)
    store_id = one_of_everything.store_id.encode()
    assert schema.metadata == {b"lane": b"train", b"segment": b"1", b"store": store_id}


CODES = {"int64": "q", "float64": "d", "uint16": "H", "11 x uint32": "11I"}


def test_a_row_is_read_at_the_documented_offsets(page: str) -> None:
    """Read at the documented offsets, types and order, a row gives what was put into it, nulls too."""
    table = _cells(_table(page, "| offset | bytes | type | field |", "**Row frame**"))
    numbers = np.array([7, 8], np.int32)
    record = turn_completed(
        "t",
        "u",
        policy=None,
        policy_version=5,
        prompt_ids=numbers,
        completion_ids=numbers,
        logprobs=np.array([-0.5, -1], np.float32),
        version_spans=(VersionSpan("é", 1, 0, 2),),
        prompt_length=2,
        prompt_sha256="sha",
    )
    row = row_of(Event(record, "run", "id", 9))
    data = encode_rows([row])
    head = {}
    for at, size, type_, field in table:
        code = struct.Struct(f"<{CODES[type_]}")
        assert code.size == int(size)
        head[field.split("`")[1] if "`" in field else field] = code.unpack_from(data, int(at))
    assert list(head)[:5] == ["time", "policy_version", "step", "reward", "schema_version"]
    assert [head[name][0] for name in list(head)[:5]] == [9, 5, 0, 0.0, 3]
    bits = re.findall(r"`(\w+)`", table[5][3])
    nulls = head["trajectory_id"][0]  # the first name in the field that says which columns are null
    assert [name for bit, name in enumerate(bits) if nulls >> bit & 1] == ["policy", "step", "reward"]
    parts = re.findall(r"`(\w+)`", " ".join(f for f, _ in _cells(_table(page, "| part | content |"))))
    at, columns = 80, {}
    for name, length in zip(parts, head["length in bytes of each part"], strict=True):
        columns[name] = data[at : at + length]
        at += length
    assert at == len(data)
    assert columns["prompt_ids"] == numbers.astype("<i4").tobytes()
    assert columns["logprobs"] == struct.pack("<2f", -0.5, -1.0)
    assert (columns["policy"], columns["event_id"]) == (b"", b"id")
    assert columns["version_spans"].decode() == '[["é",1,0,2]]'
    assert columns["extra"] == row[-1]
    assert f"fewer than {FEW} events" in page


def test_every_key_of_the_manifest_is_described(page: str, one_of_everything: Store, tmp_path: Path) -> None:
    """Every key of UNIT.json is told, and what a sealed file is like is what is written."""
    rows = _cells(_table(page, "| key | content |"))
    assert [key.strip("`") for key, _ in rows] == [f.name for f in fields(Unit)]
    for key, model in (("segments", SealedSegment), ("files", SealedFile), ("erased", Erasure)):
        content = next(content for name, content in rows if name == f"`{key}`")
        assert re.findall(r"`(\w+)`", content) == [f.name for f in fields(model)]
    store = rb.open(shutil.copytree(one_of_everything.path, tmp_path / "s"))
    list(seal_closed(store.path, "serve", SealSettings(row_group=2), all_of_it=True))
    [unit] = current_units(store.path, "serve")
    files = _cells(_table(page, "| file | rows | row group |"))
    assert files == [
        ["`turns.parquet`", _codes(FAT_KINDS), "`seal.row_group`"],
        ["`marks.parquet`", "every other kind", str(MARKS_ROW_GROUP)],
    ]
    for name in ("turns.parquet", "marks.parquet"):
        file = pq.ParquetFile(unit_folder(store.path, unit) / name)
        assert file.schema_arrow.equals(TABLE_SCHEMA)
        group = file.metadata.row_group(0)
        chunks = [group.column(i) for i in range(group.num_columns)]
        assert {chunk.compression for chunk in chunks} == {"ZSTD"}
        dictionaries = {c.path_in_schema for c in chunks if c.has_dictionary_page}
        match = re.search(r"byte-stream-split;([^;]*?)have dictionaries", page)
        assert match is not None
        assert dictionaries <= set(re.findall(r"`(\w+)`", match[1]))
        split = {c.path_in_schema for c in chunks if "BYTE_STREAM_SPLIT" in c.encodings}
        assert split == {"logprobs.list.element"}
        order = [file.schema_arrow.names[c.column_index] for c in group.sorting_columns]
        assert order == ["trajectory_id", "seq"]
    assert pq.ParquetFile(unit_folder(store.path, unit) / "turns.parquet").metadata.row_group(0).num_rows == 2


def test_every_key_of_a_bundles_manifest_is_described(page: str) -> None:
    """Every key of BUNDLE.json is told, in order, and so are the limits and the kinds of files."""
    rows = _cells(_table(page, "| key of `BUNDLE.json` | content |"))
    assert re.findall(r"`(\w+)`", " ".join(key for key, _ in rows)) == [f.name for f in fields(Bundle)]
    assert re.findall(r"`(\w+)`", rows[-1][1]) == [f.name for f in fields(Member)]
    assert f"at most {bundle.MANIFEST_BYTES >> 20} MiB" in page
    assert f"no more than {bundle.MOST_MEMBERS} files" in page
    match = re.search(r"has ((?:`\.\w+`[, and]*)+) files, and `(\S+)`;", page)
    assert match is not None
    assert all(bundle.of_model(f"a{end}") for end in re.findall(r"`(\.\w+)`", match[1]))
    assert bundle.of_model(match[2])


def test_every_derived_file_is_documented(page: str) -> None:
    """Every derived file is named, in order."""
    rows = _cells(_table(page, "| file | rows |", "## derived/"))
    assert [name.strip("`") for name, _ in rows] == list(DERIVED)
    assert f"below {OUTLIER_BELOW:g} |" in page
    columns = {name.strip("`"): re.findall(r"`(\w+)`", text) for name, text in rows}
    assert columns[LOCATIONS] == LOCATION_SCHEMA.names
    assert columns[NAMES] == ["hash", "trajectory_id"]
    assert columns[KINDS][-2:] == KIND_SCHEMA.names


@pytest.fixture(scope="module")
def reader(page: str) -> str:
    """The page's own reader."""
    return page.split("```python\n# runs\n")[1].split("```")[0]


@pytest.mark.parametrize("name", ["format-0", "format-1"])
def test_the_reader_reads_the_golden_stores(
    reader: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the page's reader makes of every golden store is what Rollbook makes of it, column by column."""
    shutil.copytree(root / "tests" / "data" / name, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "reader"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(reader, "format.md", "exec"), scope)
    log = rb.open(tmp_path / "demo-store")
    held = {lane: [e.seq for e in log.events({lane: n})] for lane, n in log.head().items()}
    assert printed.getvalue() == "".join(f"{lane} {len(seqs)}\n" for lane, seqs in sorted(held.items()))
    for lane, seqs in held.items():
        table, count = scope["read_lane"](tmp_path / "demo-store", lane)
        assert (count, table["seq"].to_pylist()) == (log.head()[lane], seqs)
        ours = log.table({lane: count}).drop_columns("lane")
        for column in ours.schema.names:
            a, b = (t[column].combine_chunks() for t in (ours, table))
            assert str(a.to_pylist()) == str(b.to_pylist()), column  # as text, where NaN is NaN
