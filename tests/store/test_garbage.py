"""Any bytes in any file of a store are read, recovered or refused by an error of ours, nothing else."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import ConfigError, RollbookError, StoreError
from rollbook.store.events import LabelAdded, TurnFailed
from rollbook.store.events.schema import LOG_SCHEMA, row_of
from rollbook.store.log import reader
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import SealSettings, StoreSettings, read_settings
from rollbook.store.upkeep.verify import verify_lane
from rollbook.store.wal import files
from rollbook.store.wal.files import Watermark
from rollbook.store.wal.frame import EMPTY_CHAIN, HEADER_FRAME, ROW_FRAME, encode_frame, encode_rows

HEADER = LOG_SCHEMA.with_metadata({"lane": "a", "segment": "1", "store": "x"}).serialize().to_pybytes()


@pytest.fixture(autouse=True, scope="module")
def _without_patience() -> Iterator[None]:
    """A file that is missing is missing: nobody seals these stores meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_PAUSES_S", (0.0,))
        patch.setattr(files.time, "sleep", lambda seconds: None)
        yield


def _attempt(store: Store) -> list[str]:
    """Use the store in every way; what was said where it was refused."""
    lane = store.path / "lanes" / "a"
    acts: list[Callable[[], Any]] = [
        store.head,
        lambda: list(store.events()),
        store.table,
        lambda: store.trajectory("t"),
        lambda: store.tail().poll(),
        lambda: LaneWriter(store.path, store.store_id, "a").close(),
        lambda: list(store.events()),
        lambda: list(seal_closed(store.path, lane.name, SealSettings(), all_of_it=True)),
    ]
    refused = []
    for act in acts:
        try:
            act()
        except RollbookError as error:
            refused.append(str(error))
    return refused


def _changed(whole: bytes) -> st.SearchStrategy[bytes]:
    """These bytes with a part replaced, left out or put in; or any others."""

    def change(place: float, length: int, new: bytes) -> bytes:
        at = int(place * len(whole))
        return whole[:at] + new + whole[at + length :]

    changes = st.builds(change, st.floats(0, 1), st.integers(0, 40), st.binary(max_size=40))
    return st.one_of(changes, st.binary(max_size=300))


# Row frames -----------------------------------------------------------------------------------------

ROWS = encode_rows([row_of(Event(LabelAdded("t", None, "n", {"v": [1, None]}), "run"))] * 2)


def _segment(payload: bytes, count: int) -> bytes:
    """A segment whose frames are whole, whatever the rows are."""
    header, chain = encode_frame(HEADER_FRAME, HEADER, 0, 0, EMPTY_CHAIN)
    rows, _ = encode_frame(ROW_FRAME, payload, 0, count, chain)
    return b"".join([*header, *rows])


@given(payload=_changed(ROWS), count=st.integers(0, 3))
@settings(max_examples=80)
def test_any_rows(tmp_path_factory: pytest.TempPathFactory, payload: bytes, count: int) -> None:
    """Bytes under a true checksum that are no rows, or rows of nonsense."""
    store = rb.open(tmp_path_factory.mktemp("rows") / "s", create=True)
    folder = store.path / "lanes" / "a"
    folder.mkdir()
    segment = _segment(payload, count)
    (folder / "00000001.wal").write_bytes(segment)
    (folder / "WATERMARK").write_bytes(Watermark(1, len(segment), count).pack())
    _attempt(store)


def test_the_rows_themselves_are_well(store: Store) -> None:
    """What the test above changes is, unchanged, a segment that is read."""
    folder = store.path / "lanes" / "a"
    folder.mkdir()
    segment = _segment(ROWS, 2)
    (folder / "00000001.wal").write_bytes(segment)
    (folder / "WATERMARK").write_bytes(Watermark(1, len(segment), 2).pack())
    assert _attempt(store) == []
    assert [e.record for e in store.events()] == [LabelAdded("t", None, "n", {"v": [1, None]})] * 2


# Watermarks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a lane of two segments, one of them sealed and its WAL gone."""
    store = rb.open(tmp_path_factory.mktemp("written") / "s", create=True)
    for i in range(2):
        with LaneWriter(store.path, store.store_id, "a") as writer:
            writer.append([Event(TurnFailed("t", f"u{j}", "x" * 50), "run") for j in range(9)]).result(30)
        if i == 0:
            list(seal_closed(store.path, "a", SealSettings(row_group=4), all_of_it=True))
            remove_sealed_wal(store.path, "a", current_units(store.path, "a"), 0)
    return store.path


NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 4000)


@given(data=st.binary(max_size=40) | st.builds(lambda *n: Watermark(*n).pack(), NUMBERS, NUMBERS, NUMBERS))
@settings(max_examples=60)
def test_any_watermark(written: Path, tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Bytes that are no watermark, and whole ones that promise anything."""
    store = rb.open(shutil.copytree(written, tmp_path_factory.mktemp("mark") / "s"))
    (store.path / "lanes" / "a" / "WATERMARK").write_bytes(data)
    _attempt(store)


# Sealed units ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=60)
def test_any_manifest(written: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A UNIT.json of any bytes, or with any value in the place of one of its own."""
    store = rb.open(shutil.copytree(written, tmp_path_factory.mktemp("unit") / "s"))
    path = store.path / "sealed" / "a" / "00000001-00000001.1" / "UNIT.json"
    whole = path.read_bytes()
    manifest = json.loads(whole)
    inner = data.draw(st.sampled_from([manifest, manifest["segments"][0], manifest["files"][0]]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
    path.write_bytes(data.draw(_changed(whole) | st.just(json.dumps(manifest).encode())))
    _attempt(store)


@given(data=st.data())
@settings(max_examples=60)
def test_any_parquet(written: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A sealed file of any bytes, or with some of its own changed, cut off or put in."""
    store = rb.open(shutil.copytree(written, tmp_path_factory.mktemp("parquet") / "s"))
    path = store.path / "sealed" / "a" / "00000001-00000001.1" / "marks.parquet"
    before = list(store.events())
    path.write_bytes(data.draw(_changed(path.read_bytes())))
    _attempt(store)
    with contextlib.suppress(StoreError):
        assert [e.record for e in store.events()][:18] == [e.record for e in before]


# The two files at the top ---------------------------------------------------------------------------


@given(data=_changed(b'{"format":1,"id":"0190","created_us":0}') | JSON.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=60)
def test_any_marker(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any STORE.json opens, or is refused as no store's or a newer one's."""
    folder = tmp_path_factory.mktemp("marker")
    (folder / "lanes").mkdir()
    (folder / "STORE.json").write_bytes(data)
    with contextlib.suppress(StoreError):
        rb.open(folder)


TOML = b"[append]\nlinger_ms = 2.0\n[seal]\nrow_group = 64\n[remote]\nuri = 's3://b'\n"


@given(data=_changed(TOML))
@settings(max_examples=60)
def test_any_settings(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any store.toml gives settings or a ConfigError that names the file."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "store.toml").write_bytes(data)
    refused = []
    try:
        assert isinstance(read_settings(folder), StoreSettings)
    except ConfigError as error:
        refused.append(str(error))
    assert all(str(folder / "store.toml") in reason for reason in refused)


def test_verify_names_what_is_wrong(written: Path, tmp_path: Path) -> None:
    """Garbage in a sealed file is found by `rollbook store verify` even where no page of it is read."""
    store = rb.open(shutil.copytree(written, tmp_path / "s"))
    path = store.path / "sealed" / "a" / "00000001-00000001.1" / "marks.parquet"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert "marks.parquet" in str(verify_lane(store.path, "a"))
