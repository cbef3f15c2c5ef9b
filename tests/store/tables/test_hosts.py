"""Several hosts write one store: its tables are of all, and each host publishes its own lanes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fakes.storage.tables import append, bits, odd_events, planned, sealed_rows, table_of
from tests.store.hosts.conftest import Hosts

from rollbook.store.errors import CatalogError
from rollbook.store.log.store import Store
from rollbook.store.sealed.remote import remote_place
from rollbook.store.settings import MediumSettings, read_settings
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ALLOWED, ObjectStorage
else:
    from tests.fakes.storage.s3_server import ALLOWED


@pytest.fixture
def hosts(tmp_path: Path, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts over a folder, whose units go to object storage."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", f"{ALLOWED},{tmp_path}")
    made = Hosts(tmp_path, MediumSettings(url=f"file://{tmp_path}/medium"))
    yield made
    made.close()


def _remote(host: Store, storage: Any) -> None:
    path = host.path / "store.toml"
    path.write_text(f'{path.read_text()}\n[remote]\nuri = "{storage.uri}"\nendpoint = "{storage.endpoint}"\n')


def _rows(host: Store, storage: Any) -> list[dict[str, Any]]:
    table = table_of(host, "turns", {"s3.endpoint": storage.endpoint, "s3.region": "us-east-1"})
    parts = []
    for address in planned(table):
        system, path = remote_place(address, read_settings(host.path).remote)
        parts.append(pq.read_table(path, filesystem=system))
    return bits("turns", pa.concat_tables(parts))


def _seal(host: Store, lane: str, *names: str) -> None:
    append(host, lane, odd_events(*names))
    if host.carrier is not None:
        host.carrier.catch_up()
    assert Sealer(host).run_once().damage == {}


def test_each_host_publishes_its_own_lanes(
    hosts: Hosts, storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one adds, merges and removes leaves the files of the other, whatever it knows of them."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", f"sqlite:///{tmp_path}/shared.db")
    a, b = hosts.open("a"), hosts.open("b")
    for host in (a, b):
        _remote(host, storage)
        _seal(host, "serve", f"of-{host.path.name}")
    [turns, marks] = publish_tables(a).tables
    assert (turns.table, marks.table) == ("rollbook.turns", "rollbook.marks")
    assert (turns.files, turns.added) == (1, 1)
    [turns, _] = publish_tables(b).tables
    assert (turns.files, turns.added, turns.removed) == (2, 1, 0)
    assert _rows(a, storage) == _both(a, b)
    assert [table.added + table.removed for table in publish_tables(a).tables] == [0, 0]
    for i in range(3):  # the last of these merges
        _seal(b, "serve", f"more-{i}")
    [turns, _] = publish_tables(b).tables
    assert (turns.files, turns.added, turns.removed) == (2, 1, 1)
    assert _rows(b, storage) == _both(a, b)
    assert [table.added + table.removed for table in publish_tables(a).tables] == [0, 0]


def _both(*hosts: Store) -> list[dict[str, Any]]:
    """The rows of each host's own lanes, by its own reader."""
    rows = [row for host in hosts for row in bits("turns", sealed_rows(host, "turns"))]
    return sorted(rows, key=lambda row: [str(row["lane"]), str(row["seq"])])


def test_a_catalog_of_one_host_alone_is_refused(hosts: Hosts, storage: ObjectStorage) -> None:
    """It would have a part of the store, and say nothing of the rest."""
    a = hosts.open("a")
    _remote(a, storage)
    with pytest.raises(CatalogError, match=r"is one of several hosts .* set \[catalog\] url to PostgreSQL"):
        publish_tables(a)
