"""Sealing, deriving and removing WAL files change no answer, at any cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.scattered import SEAL, Before, answers, scatter, seal_in_units

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.sealed.derived import DERIVED, SUMMED, build_derived
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units

pytestmark = pytest.mark.usefixtures("some_tokens_are_outliers")

CUTS = ["head", *[f"serve={n},train=4" for n in (3, 8, 13)]]


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, story: dict[str, list[Event]], upkeep: list[Event]
) -> Store:
    """The story with one event a segment, so that every turn and trajectory lies in several; only read it."""
    store = rb.open(tmp_path_factory.mktemp("written") / "store", create=True)
    return scatter(store, {**story, "upkeep": upkeep})


@pytest.fixture(scope="module")
def before(written: Store) -> Before:
    """The answers at each cut, of which nothing is sealed."""
    return Before(written)


@pytest.fixture
def scattered(written: Store, tmp_path: Path) -> Store:
    """A copy of that store, to be sealed."""
    return rb.open(shutil.copytree(written.path, tmp_path / "store"))


@pytest.mark.more_but("4-one")
@pytest.mark.parametrize(
    ("at_once", "cuts"),
    [(1, [CUTS] * 3), (4, [CUTS] * 3), (4, [CUTS[:1], CUTS[2:3], CUTS[:1]])],
    ids=["1", "4", "4-one"],
)
def test_no_answer_changes(scattered: Store, before: Before, at_once: int, cuts: list[list[str]]) -> None:
    """All views say the same before sealing, after it, with derived files, and without the WAL."""
    assert all(len(rows) > 0 for name, rows in before["head"].items()), "a view without rows proves nothing"
    seal_in_units(scattered, "serve", at_once=at_once)
    seal_in_units(scattered, "train", at_once=at_once)
    assert len(current_units(scattered.path, "serve")) > 0
    for cut in cuts[0]:
        assert answers(scattered, cut) == before[cut]
    for lane in ("serve", "train"):
        for unit in current_units(scattered.path, lane):
            assert build_derived(scattered.path, unit) == list(DERIVED)
    for cut in cuts[1]:
        assert answers(scattered, cut) == before[cut]
    for lane in ("serve", "train"):
        assert remove_sealed_wal(scattered.path, lane, current_units(scattered.path, lane), 0)
    for cut in cuts[2]:
        assert answers(scattered, cut) == before[cut]


@pytest.mark.more
def test_derived_files_can_be_deleted(scattered: Store, before: Before) -> None:
    """Without some of its derived files a unit gives the same answers, and each comes back the same."""
    seal_in_units(scattered, "serve", at_once=4)
    units = current_units(scattered.path, "serve")
    for unit in units:
        build_derived(scattered.path, unit)
    assert answers(scattered) == before["head"]
    for name in DERIVED:
        files = {p: p.read_bytes() for p in (scattered.path / "derived").rglob(name)}
        assert len(files) == len(units), name
        for path in list(files)[::2]:
            path.unlink()
        assert answers(scattered) == before["head"], f"without {name}"
        for unit in units:
            build_derived(scattered.path, unit)
        assert {p: p.read_bytes() for p in files} == files, name
    shutil.rmtree(scattered.path / "derived")
    assert answers(scattered) == before["head"]


def test_what_an_older_release_derived_is_enough(scattered: Store, before: Before) -> None:
    """Units without what the ledger sums up, beside others that have it, give the same answers."""
    for lane in ("serve", "train"):
        seal_in_units(scattered, lane, at_once=4)
        for unit in current_units(scattered.path, lane):
            build_derived(scattered.path, unit)
    assert answers(scattered) == before["head"]
    for name in SUMMED:
        for file in sorted((scattered.path / "derived").rglob(name))[::2]:
            file.unlink()
    assert answers(scattered) == before["head"]


def test_sealed_files_are_what_any_reader_expects(scattered: Store) -> None:
    """Plain DuckDB and pandas-like readers see the events in the files, fat ones apart from small ones."""
    import duckdb
    import pyarrow.parquet as pq

    seal_in_units(scattered, "serve", at_once=100)
    [unit] = current_units(scattered.path, "serve")
    folder = scattered.path / "sealed" / "serve" / unit.name
    kinds = "SELECT DISTINCT kind FROM read_parquet('{}') ORDER BY kind"
    fat = duckdb.sql(kinds.format(folder / "turns.parquet")).fetchall()
    assert fat == [("turn.completed",), ("turn.requested",)]
    small = [row[0] for row in duckdb.sql(kinds.format(folder / "marks.parquet")).fetchall()]
    assert "reward.assigned" in small
    assert not {"turn.completed", "turn.requested"} & set(small)
    table = pq.read_table(folder / "turns.parquet", columns=["trajectory_id", "seq", "logprobs"])
    ids = table["trajectory_id"].to_pylist()
    assert ids == sorted(ids)
    assert [-1.0, -2.0, -4.0] in table["logprobs"].to_pylist()


def test_the_log_reads_the_same_from_sealed_files(
    scattered: Store, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """events(), from any start, are bit for bit those of the WAL."""
    before = [plain(e) for e in scattered.events()]
    for lane in scattered.lanes():
        list(seal_closed(scattered.path, lane, SEAL))
        remove_sealed_wal(scattered.path, lane, current_units(scattered.path, lane), 0)
    assert not list(Path(scattered.path).glob("lanes/serve/00000001.wal"))
    assert [plain(e) for e in scattered.events()] == before
    for start in range(0, 18, 5):
        expected = [e for e in before if e["lane"] != "serve" or e["seq"] >= start]
        assert [plain(e) for e in scattered.events(start={"serve": start})] == expected
