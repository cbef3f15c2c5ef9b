"""Object storage for the tests of sealed files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

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
