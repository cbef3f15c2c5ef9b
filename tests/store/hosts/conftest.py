"""Hosts of one store: folders of their own, and a medium between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollbook import store
from rollbook.store import Store
from rollbook.store.config import toml_text
from rollbook.store.events import Event, LabelAdded
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.join import join
from rollbook.store.ids import new_id
from rollbook.store.log.store import Store as LogStore
from rollbook.store.marker import read_marker
from rollbook.store.settings import MediumSettings, OwnMediumSettings

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


class Hosts:
    """Makes hosts of one store, and ends what carries them."""

    def __init__(self, folder: Path, settings: MediumSettings) -> None:
        self.folder, self.settings = folder, settings
        self.tables: dict[str, dict[str, object]] = {}
        """Of every host's store.toml, beside the medium's."""
        self._carriers: list[Carrier] = []
        store.open(folder / "a", create=True)
        self.store_id = read_marker(folder / "a")
        self._write_settings(folder / "a", settings)

    def _write_settings(self, folder: Path, settings: MediumSettings) -> None:
        (folder / "store.toml").write_text(toml_text({"medium": settings.table(), **self.tables}))

    def open(self, name: str, **changes: object) -> LogStore:
        """One process of a host; the host is made where it is not there yet."""
        folder = self.folder / name
        settings = self.settings.model_copy(update=changes)
        if not folder.exists():
            self.first().close()
            join(folder, f"{self.settings.url}/{self.store_id}", settings)
        self._write_settings(folder, settings)
        own = OwnMediumSettings(**settings.model_dump())
        carrier = Carrier(folder, self.store_id, own)
        self._carriers.append(carrier)
        carrier.catch_up()
        return LogStore(folder, self.store_id, carrier=carrier)

    def first(self) -> Carrier:
        """A process of the first host that has said what store it is."""
        carrier = Carrier(self.folder / "a", self.store_id, OwnMediumSettings(**self.settings.model_dump()))
        assert carrier.session.valid
        return carrier

    def close(self) -> None:
        """End all processes."""
        for carrier in self._carriers:
            carrier.close()


@pytest.fixture
def hosts(tmp_path: Path, medium_settings: MediumSettings) -> Iterator[Hosts]:
    """Hosts over each medium."""
    made = Hosts(tmp_path, medium_settings)
    yield made
    made.close()


@pytest.fixture
def object_hosts(tmp_path: Path, storage: ObjectStorage) -> Iterator[Hosts]:
    """Hosts over object storage, where their units go too; it acts up on request."""
    made = Hosts(tmp_path, MediumSettings(url=f"s3://{storage.BUCKET}/team", endpoint=storage.endpoint))
    yield made
    made.close()


@pytest.fixture
def folder_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts over a folder, the quickest medium."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    made = Hosts(tmp_path, MediumSettings(url=f"file://{tmp_path}/medium"))
    yield made
    made.close()


@pytest.fixture
def note() -> Callable[..., Event]:
    """Makes a small event that says something."""

    def make(value: str, trajectory_id: str | None = None) -> Event:
        return Event(LabelAdded(trajectory_id or new_id(), None, "note", value), "r")

    return make


def rows(log: Store) -> dict[tuple[str, int], tuple[str, str]]:
    """(lane, seq) -> (event id, value) of all events."""
    return {(e.lane, e.seq): (e.event_id, str(e.record)) for e in log.events()}
