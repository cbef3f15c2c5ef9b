"""What the tests of the store share: object storage for sealed files, and other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.fakes.processes.warm import WarmProcess

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


@pytest.fixture(scope="session")
def fork_python() -> Callable[..., subprocess.Popen[str]]:
    """`start_python`, of a process that has imported Rollbook: for what a process does, not how it starts."""

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", code, *map(str, args)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return WarmProcess(words, text=True, **pipes)

    return start
