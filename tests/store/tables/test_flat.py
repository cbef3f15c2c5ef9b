"""What a commit costs in files and bytes does not grow with the commits before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.storage.tables import append, odd_events, planned, table_of

from rollbook import store as rb
from rollbook.bench.cluster_tables import link_unit, link_units, linked
from rollbook.store import Store
from rollbook.store.sealed.unit import current_units
from rollbook.store.tables import publish
from rollbook.store.tables.definitions import LISTED, MERGED
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer


@pytest.fixture(scope="module")
def one_once(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of one small unit; only read it."""
    store = rb.open(tmp_path_factory.mktemp("one") / "store", create=True)
    append(store, "a", odd_events("t"))
    assert Sealer(store).run_once().damage == {}
    return store


@pytest.fixture
def store(one_once: Store, tmp_path: Path) -> Store:
    """A store of that lane, without a unit."""
    return linked(one_once, tmp_path / "store")


@pytest.fixture
def more_units(one_once: Store, store: Store) -> Callable[[int], None]:
    """A function that gives the store so many more units. They hold the same rows, which nobody reads here,
    under segments of their own."""
    made = [0]

    def make(count: int) -> None:
        link_units(one_once, store, range(made[0] + 1, made[0] + count + 1))
        made[0] += count

    return make


def _metadata(store: Store, name: str = "turns") -> dict[str, int]:
    """Name -> bytes of each file of a table's metadata."""
    folder = store.path / "iceberg" / name / "metadata"
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.fixture
def of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the table of turns: the others are no different here."""
    monkeypatch.setattr(publish, "TABLES", publish.TABLES[:1])


@pytest.mark.usefixtures("of_turns")
@pytest.mark.more_but("24-by-1")
@pytest.mark.parametrize(("units", "each"), [(24, 1), (1000, 10)], ids=["24-by-1", "1000-by-10"])
def test_a_commit_costs_what_an_earlier_one_did(
    store: Store, more_units: Callable[[int], None], units: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that it writes, metadata that it leaves, and manifests that a reader opens stay bounded."""
    monkeypatch.setattr(publish, "KEPT", 4)
    commits = units // each
    written, left, manifests = [], [], []
    for _ in range(commits):
        before = _metadata(store) if (store.path / "iceberg").exists() else {}
        more_units(each)
        publish_tables(store)
        after = _metadata(store)
        written.append(len(after.keys() - before.keys()))
        left.append(len(after))
        table = table_of(store, "turns")
        snapshot = table.current_snapshot()
        assert snapshot is not None
        manifests.append(len(snapshot.manifests(table.io)))
        assert len(table.snapshots()) < 8
        assert len(table.metadata.snapshot_log) < 8
        assert after[table.metadata_location.rpartition("/")[2]] < 20_000
    assert len(planned(table_of(store, "turns"))) == units
    assert max(manifests) < MERGED
    assert max(written) <= 5  # a manifest or two, their list, metadata, and that of an expiry
    # Between two expiries: metadata that is listed or new, and a list and two manifests of each snapshot.
    assert max(left) <= LISTED + 8 + 3 * 8


@pytest.mark.usefixtures("of_turns")
def test_swaps_alone_merge_manifests_too(store: Store, more_units: Callable[[int], None]) -> None:
    """Each merge of units removes files; their manifests do not pile up."""
    more_units(3)
    publish_tables(store)
    for round_ in range(MERGED):
        unit = current_units(store.path, "a")[0]
        successor = replace(unit, generation=unit.generation + 1)
        link_unit(store, unit, store, successor)
        [done] = publish_tables(store).tables
        assert (done.added, done.removed) == (1, 1), round_
        table = table_of(store, "turns")
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert len(snapshot.manifests(table.io)) < MERGED + 2
    assert len(table.snapshots()) > 1 + MERGED
    assert len(planned(table)) == 3


@pytest.mark.usefixtures("of_turns")
def test_expiry_removes_what_nothing_names(
    store: Store, more_units: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a killed commit left; and nothing that a kept snapshot needs."""
    monkeypatch.setattr(publish, "KEPT", 2)
    more_units(1)
    publish_tables(store)
    stray = store.path / "iceberg" / "turns" / "metadata" / "left-m0.avro"
    stray.write_bytes(b"of a commit that never was")
    for _ in range(3):
        assert stray.exists()
        more_units(1)
        publish_tables(store)
    assert not stray.exists()
    table = table_of(store, "turns")
    assert len(table.snapshots()) == 2
    for snapshot in table.snapshots():
        assert len(list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())) in (3, 4)
    named = {entry.metadata_file.rpartition("/")[2] for entry in table.metadata.metadata_log}
    named |= {snapshot.manifest_list.rpartition("/")[2] for snapshot in table.snapshots()}
    for snapshot in table.snapshots():
        named |= {m.manifest_path.rpartition("/")[2] for m in snapshot.manifests(table.io)}
    assert _metadata(store).keys() == named | {table.metadata_location.rpartition("/")[2]}


@pytest.mark.usefixtures("of_turns")
def test_a_tag_keeps_its_snapshot(
    store: Store, more_units: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tags one, to read it again, keeps its metadata; the files it names go with their units."""
    monkeypatch.setattr(publish, "KEPT", 1)
    more_units(1)
    publish_tables(store)
    table = table_of(store, "turns")
    first = table.snapshots()[0].snapshot_id
    table.manage_snapshots().create_tag(first, "mine").commit()
    for _ in range(4):
        more_units(1)
        publish_tables(store)
    table = table_of(store, "turns")
    assert first in {snapshot.snapshot_id for snapshot in table.snapshots()}
    assert len(list(table.scan(snapshot_id=first).plan_files())) == 1
