"""Bytes that anybody may have written, Arrow, Parquet, SQLite, JSON, frames: an error, in little memory."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.errors import CatalogError, ConfigError, CorruptionError, FormatError, NotAStoreError
from rollbook.store.events.batches import encode
from rollbook.store.events.codec import decode
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.sealed.derived import LOCATION_SCHEMA, LOCATIONS, build_derived
from rollbook.store.sealed.page_headers import refuse_large_pages
from rollbook.store.sealed.parquet import checked_parquet
from rollbook.store.sealed.point_read import trajectory_rows
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.sealed.unit import current_units, derived_folder, unit_folder
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.arrow_bytes import read_batch, read_file, read_schema
from rollbook.store.wal.frame import EMPTY_CHAIN, MAGIC, ROW_FRAME, encode_frame, valid_frame_after


@pytest.fixture
def batch(story: dict[str, list[Event]]) -> pa.RecordBatch:
    """The story's first lane as one batch."""
    encoded: pa.RecordBatch = encode(story["serve"], 0)
    return encoded


@pytest.fixture(scope="module")
def sealed_once(story: dict[str, list[Event]], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The story's first lane, sealed and derived; only read it."""
    log = rb.open(tmp_path_factory.mktemp("sealed") / "store", create=True)
    with log.writer("serve", AppendSettings(segment_bytes=1)) as writer:
        for event in story["serve"]:
            writer.append([event]).result(30)
    for unit in seal_closed(log.path, "serve", SealSettings()):
        build_derived(log.path, unit)
    return log


@pytest.fixture
def sealed(sealed_once: Store, tmp_path: Path) -> Store:
    """A copy of that store."""
    return rb.open(shutil.copytree(sealed_once.path, tmp_path / "store"))


# Arrow -----------------------------------------------------------------------------------------------


def test_what_we_write_is_read(batch: pa.RecordBatch) -> None:
    """A batch of ours passes, without a copy."""
    data = batch.serialize()
    assert read_batch(data, LOG_SCHEMA).equals(batch)
    assert read_schema(LOG_SCHEMA.serialize()).equals(LOG_SCHEMA)


def test_a_compressed_batch_is_not_unpacked() -> None:
    """A kilobyte that stands for half a gigabyte is refused before any of it is made."""
    large = pa.record_batch({"x": pa.array(np.zeros(1 << 22))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, large.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_batch(large)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    data = messages.read_next_message().serialize()
    assert data.size < 1 << 16
    before = pa.total_allocated_bytes()
    with pytest.raises(pa.ArrowInvalid, match="compressed"):
        read_batch(data, large.schema)
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("offsets", [[0, 1 << 30, 4], [0, 4, -9], [0, -(1 << 30), 4], [3, 2, 1]])
def test_offsets_that_lead_out_of_the_buffer(offsets: list[int]) -> None:
    """Arrow would follow them when a value is looked at."""
    data = pa.record_batch({"x": ["ab", "cd"]}).serialize().to_pybytes()
    good = np.array([0, 2, 4], np.int32).tobytes()
    assert data.count(good) == 1
    data = data.replace(good, np.array(offsets, np.int32).tobytes())
    with pytest.raises(pa.ArrowInvalid):
        read_batch(data, pa.schema([("x", pa.string())]))


def test_text_that_is_none() -> None:
    """A string column that is not UTF-8 is damage, not a Python error when it is printed."""
    buffers = [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    data = pa.record_batch([pa.Array.from_buffers(pa.string(), 1, buffers)], names=["x"]).serialize()
    with pytest.raises(pa.ArrowInvalid):
        read_batch(data, pa.schema([("x", pa.string())]))


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_any_spoiled_byte_of_its_metadata(batch: pa.RecordBatch, at: int) -> None:
    """It is read as what it was, or refused by Arrow's error; never anything else."""
    data = bytearray(batch.serialize().to_pybytes())
    data[at % len(data)] ^= 0xFF
    with suppress(pa.ArrowException):
        read_batch(bytes(data), LOG_SCHEMA)


def test_a_schema_without_end() -> None:
    """Two thousand columns are none of ours."""
    wide = pa.schema([(f"c{i}", pa.int8()) for i in range(2000)])
    with pytest.raises(pa.ArrowInvalid, match="2,000 columns"):
        read_schema(wide.serialize())


def test_bytes_that_are_no_batch_are_refused(batch: pa.RecordBatch) -> None:
    """Another message, cut bytes and none at all."""
    for data in (
        LOG_SCHEMA.serialize().to_pybytes(),
        b"",
        b"\xff\xff\xff\xff",
        batch.serialize()[:100].to_pybytes(),
    ):
        with pytest.raises(pa.ArrowException):
            read_batch(data, LOG_SCHEMA)


def _locations(sealed: Store, rows: list[dict[str, Any]], **options: Any) -> Path:
    [unit] = current_units(sealed.path, "serve")
    path = derived_folder(sealed.path, unit) / LOCATIONS
    table = pa.Table.from_pylist(rows, LOCATION_SCHEMA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, LOCATION_SCHEMA, **options) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"file": "../../../../outside.parquet", "first_row": 0, "rows": 1},
        {"file": "/etc/passwd", "first_row": 0, "rows": 1},
        {"file": "turns.parquet", "first_row": -5, "rows": 1},
        {"file": "turns.parquet", "first_row": 0, "rows": 1 << 62},
    ],
)
def test_where_a_trajectory_is_not(sealed: Store, row: dict[str, Any]) -> None:
    """A derived file that names another file, or rows that no file has, counts as one that is missing."""
    [unit] = current_units(sealed.path, "serve")
    rows = trajectory_rows(sealed.path, unit, "t1")
    _locations(sealed, [{"trajectory_id": "t1"} | row])
    assert trajectory_rows(sealed.path, unit, "t1").equals(rows)
    assert len(rows) > 5


def test_a_derived_file_of_another_form(sealed: Store) -> None:
    """Compressed, or of another schema: it counts as missing."""
    [unit] = current_units(sealed.path, "serve")
    rows = trajectory_rows(sealed.path, unit, "t1")
    row = {"trajectory_id": "t1", "file": "turns.parquet", "first_row": 0, "rows": 1}
    path = _locations(sealed, [row] * 1000, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(pa.ArrowInvalid, match="compressed"):
        read_file(pa.py_buffer(path.read_bytes()), LOCATION_SCHEMA)
    assert trajectory_rows(sealed.path, unit, "t1").equals(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("x", pa.int8())])) as writer:
        writer.write_table(pa.table({"x": pa.array([1], pa.int8())}))
    assert trajectory_rows(sealed.path, unit, "t1").equals(rows)


# Parquet ---------------------------------------------------------------------------------------------


def test_a_few_bytes_for_a_billion_values(tmp_path: Path) -> None:
    """A row group that stands for gigabytes is refused by what it says of itself, before it is read."""
    zeros = pa.array(np.zeros(1 << 21, np.int32))
    pq.write_table(pa.table({"x": zeros}), tmp_path / "rows", row_group_size=1 << 21, use_dictionary=True)
    assert (tmp_path / "rows").stat().st_size < 1 << 16
    with (tmp_path / "rows").open("rb") as file, pytest.raises(pa.ArrowInvalid, match="2,097,152 rows"):
        checked_parquet(file)


def test_pages_of_ours_pass(tmp_path: Path) -> None:
    """Of every kind of column, compressed or not, with dictionaries and without, of both versions."""
    rows = {
        "a": pa.array([1, 2, None] * 300),
        "s": pa.array(["x" * (i % 50) for i in range(900)]),
        "l": pa.array([[1, 2], [], None] * 300, pa.list_(pa.int32())),
        "d": pa.array([{"a": 1.5, "b": "x"}] * 900),
    }
    for version, compression, dictionary in product(("1.0", "2.0"), ("zstd", "none"), (True, False)):
        pq.write_table(
            pa.table(rows),
            tmp_path / "rows",
            data_page_version=version,
            compression=compression,
            use_dictionary=dictionary,
            row_group_size=400,
            data_page_size=500,
            write_page_checksum=True,
        )
        refuse_large_pages(tmp_path / "rows", 1 << 20, 1 << 20)


def test_pages_that_stand_for_gigabytes(tmp_path: Path) -> None:
    """A large page, a dictionary whose entry each row repeats, values by their prefixes: all refused."""
    text = "a" * (1 << 20)
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4096, np.int32)), pa.array([text]))
    plain: dict[str, Any] = {"use_dictionary": False, "compression": "zstd"}
    for column, options, message in (
        (pa.array([text * 2]), plain, r"column x has a page of 2,097,1\d\d bytes, of 1,100,000"),
        (pa.array(["a", text * 2]), {"compression": "zstd"}, r"column x has a page of 2,097,1\d\d bytes"),
        (repeated, {"compression": "zstd"}, r"row group 0 takes up to 4,29\d,\d\d\d,\d\d\d bytes"),
        (
            pa.array([text[:1000]] * 4096),
            plain | {"column_encoding": {"x": "DELTA_BYTE_ARRAY"}},
            "has values by their prefixes",
        ),
    ):
        pq.write_table(pa.table({"x": column}), tmp_path / "rows", **options)
        assert (tmp_path / "rows").stat().st_size < 1 << 16
        with pytest.raises(pa.ArrowInvalid, match=message):
            refuse_large_pages(tmp_path / "rows", 1_100_000, 1 << 31)


def test_pages_that_their_footer_does_not_know(tmp_path: Path) -> None:
    """A header that says more bytes than its footer, and any other spoiled byte: refused, or as it was."""
    column = pa.table({"x": pa.array(["a" * 300_000])})
    pq.write_table(column, tmp_path / "rows", use_dictionary=False, compression="zstd")
    data = (tmp_path / "rows").read_bytes()
    size, more = _zigzag(300_000 + 4 + 6), _zigzag((1 << 20) - 1)
    assert data.count(size) == 1
    assert len(size) == len(more)
    (tmp_path / "rows").write_bytes(data.replace(size, more))
    with pytest.raises(
        pa.ArrowInvalid, match=r"1 values in pages of 1,048,\d+ bytes, and its footer says 1 in"
    ):
        refuse_large_pages(tmp_path / "rows")
    for at in range(4, 60):
        (tmp_path / "rows").write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        with suppress(pa.ArrowInvalid):
            refuse_large_pages(tmp_path / "rows")


def _zigzag(number: int) -> bytes:
    """A number as thrift writes it."""
    value, coded = number << 1, []
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


def test_a_sealed_file_of_that_kind(sealed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader of sealed files refuses it, and says that it is damaged."""
    monkeypatch.setattr("rollbook.store.sealed.parquet.MOST_BYTES", 10)
    [unit] = current_units(sealed.path, "serve")
    reads = {
        "one trajectory": lambda: trajectory_rows(sealed.path, unit, "t1"),
        "all": lambda: [list(sealed.events({"serve": 10})), _without_wal(sealed)],
    }
    for read in reads.values():
        with pytest.raises(CorruptionError, match="which none of ours has"):
            read()
    [fault] = [lane.fault for lane in verify_store(sealed)]
    assert "which none of ours has" in str(fault)


def _without_wal(log: Store) -> None:
    for path in (log.path / "lanes" / "serve").glob("*.wal"):
        path.unlink()
    list(log.events({"serve": 10}))


def test_a_footer_that_is_a_bomb_of_its_own(sealed: Store) -> None:
    """Any spoiled byte of a footer is damage."""
    [unit] = current_units(sealed.path, "serve")
    path = unit_folder(sealed.path, unit) / "marks.parquet"
    data = path.read_bytes()
    for at in range(1, 400, 23):
        path.write_bytes(data[:-at] + bytes([data[-at] ^ 0xFF]) + data[len(data) - at + 1 :])
        [fault] = [lane.fault for lane in verify_store(sealed)]
        assert fault is not None


# JSON, frames, SQLite --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [900, 1023, 10_000, 200_000])
def test_json_nested_without_end(batch: pa.RecordBatch, depth: int, tmp_path: Path) -> None:
    """A record nested so deep is damage for readers; SQL answers, or refuses, and goes on."""
    place = batch.column("kind").to_pylist().index("turn.requested")
    evil = '{"messages":' + "[" * depth + "]" * depth + ',"request":{"x":{"$body":1}}}'
    texts = batch.column("extra").to_pylist()
    texts[place] = evil
    spoiled = batch.set_column(batch.schema.get_field_index("extra"), "extra", pa.array(texts, pa.string()))
    with pytest.raises(CorruptionError):
        list(decode(spoiled, "serve", lambda digest: None))


def test_columns_that_are_no_text(batch: pa.RecordBatch) -> None:
    """From a file whose text was never checked: damage, not a Python error."""
    buffers = [None, pa.py_buffer(np.array([0, *[2] * len(batch)], np.int32)), pa.py_buffer(b"\xff\xfe")]
    evil = pa.Array.from_buffers(pa.string(), len(batch), buffers)
    spoiled = batch.set_column(batch.schema.get_field_index("run"), "run", evil)
    with pytest.raises(CorruptionError, match="not in its columns"):
        list(decode(spoiled, "serve"))


def test_a_file_of_nothing_but_seeming_frames() -> None:
    """A million headers that each claim the rest of the file: looked through in bounded time."""
    size = 1 << 23
    header, *_ = encode_frame(ROW_FRAME, b"", 0, 0, EMPTY_CHAIN)[0]
    evil = bytearray(bytes(header) * (size // 64))
    claims = np.frombuffer(evil, np.uint32).reshape(-1, 16)
    claims[:, 2] = [max(size - 64 * (i + 1) - 64, 0) for i in range(size // 64)]
    begun = time.process_time()
    assert evil[:4] == MAGIC
    assert valid_frame_after(memoryview(evil), 0) is not None
    assert time.process_time() - begun < 20


def test_a_valid_frame_is_found_behind_seeming_ones() -> None:
    """Bytes that only look like a frame hide none that is one."""
    parts, _ = encode_frame(ROW_FRAME, b"payload", 3, 1, EMPTY_CHAIN)
    frame = b"".join(map(bytes, parts))
    for before in (b"", bytes(640), (MAGIC + bytes(60)) * 20):
        data = bytes(64) + before + frame
        assert valid_frame_after(memoryview(data), 0) == 64 + len(before)
    assert valid_frame_after(memoryview(bytes(1024)), 0) is None
    assert valid_frame_after(memoryview(bytes(64) + frame[:-64]), 0) is None


@pytest.mark.parametrize(
    "evil",
    [
        "create view lanes as with recursive r(x) as (values (1) union all select x from r) select 1 from r",
        "create trigger t after insert on y begin delete from y; end",
        "create virtual table z using fts5(a)",
    ],
)
def test_a_catalog_that_is_a_program(story_store: Store, evil: str) -> None:
    """Views and triggers in a SQLite file are never run: it is set aside, and made anew."""
    for path in story_store.path.glob("catalog.db*"):
        path.unlink()
    with closing(sqlite3.connect(story_store.path / "catalog.db")) as database:
        database.execute("create table y (a)")
        database.execute(evil)
        database.commit()
    begun = time.monotonic()
    with pytest.raises(CatalogError, match="none of its tables"):
        Catalog.of(story_store.path)
    rebuilt = rebuild_catalog(story_store)
    assert rebuilt.moved is not None
    with closing(Catalog.of(story_store.path)) as catalog:
        assert catalog.rows()["lanes"]
    assert time.monotonic() - begun < 20


def test_settings_that_are_a_bomb(story_store: Store) -> None:
    """Nested tables without end, and a key of a megabyte."""
    for text in ("[" * 5000, "a" * 100_000 + " = 1", "a = " + "[" * 50_000, "x = 1" + "0" * 5000):
        (story_store.path / "store.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"store\.toml"):
            story_store.settings()


def test_a_marker_that_is_a_bomb(story_store: Store) -> None:
    """Whatever STORE.json holds, it is no store's."""
    for data in (b"[" * 100_000, b"1" * 5000, orjson.dumps({"format": "9" * 4000, "id": 1}), b"\xff"):
        (story_store.path / "STORE.json").write_bytes(data)
        with pytest.raises((NotAStoreError, FormatError)):
            rb.open(story_store.path)
