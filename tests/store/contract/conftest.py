"""What the contract's tests run over: a store on disk, one sealed after each append, a log in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.storage.memory_log import MemoryLog

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import WriteFailedError
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.sealer import adopted

Log = Any
"""What the contract is about: the methods that its tests call."""


class SealedStore(Store):
    """A store in which nothing is left of the WAL after each append: all is read out of sealed units."""

    def writer(self, lane: str, settings: AppendSettings | None = None) -> Any:
        """Take a lane for writing."""
        return SealingWriter(self, lane, settings)


class SealingWriter:
    """Takes the lane anew for each append, and seals it after."""

    def __init__(self, store: SealedStore, lane: str, settings: AppendSettings | None) -> None:
        self.lane, self.failure = lane, None
        self._store, self._settings = store, settings
        self._gate = threading.Lock()
        self._closed = False
        self._writer: LaneWriter | None = Store.writer(store, lane, settings)

    def append(self, events: Sequence[Event]) -> Future[int]:
        """Append, seal, and only then hand the future out."""
        with self._gate:
            if self._closed:
                future: Future[int] = Future()
                future.set_exception(WriteFailedError(f"lane {self.lane!r}: it is closed"))
                return future
            assert self._writer is not None
            future = self._writer.append(events)
            future.exception(30)
            self._seal()
            # Not `Store.writer`: the catalog knows of the lane already, and costs time.
            self._writer = LaneWriter(self._store.path, self._store.store_id, self.lane, self._settings)
            return future

    def _seal(self) -> None:
        assert self._writer is not None
        self._writer.close()
        store = self._store.path
        with adopted(store, self.lane) as ours:
            if ours:
                list(seal_closed(store, self.lane, SealSettings(row_group=2), all_of_it=True))
        remove_sealed_wal(store, self.lane, current_units(store, self.lane), 0)
        head = self._store.head().get(self.lane, 0)
        units = current_units(store, self.lane)
        # What is left as WAL is a segment that holds no event.
        assert head == (units[-1].next_seq if units else 0)

    def close(self) -> None:
        """Give the lane back."""
        with self._gate:
            self._closed = True
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> SealingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_disk(folder: Path) -> Store:
    return rb.open(folder, create=True)


def _sealed(folder: Path) -> Store:
    store = rb.open(folder, create=True)
    return SealedStore(store.path, store.store_id)


BACKENDS: dict[str, Callable[[Path], Log]] = {
    "wal": _on_disk,
    "sealed": _sealed,
    "memory": lambda folder: MemoryLog(),
}


@pytest.fixture(params=BACKENDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    """An empty log of each kind."""
    return BACKENDS[request.param](tmp_path / "log")
