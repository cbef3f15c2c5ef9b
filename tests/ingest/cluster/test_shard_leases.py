"""A proxy's view of the others, where what carries the store does not answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rollbook.ingest.cluster import shard_leases
from rollbook.ingest.cluster.shard_leases import ShardLeases
from rollbook.store.errors import MediumError


@pytest.mark.parametrize(
    ("error", "is_fault"), [(MediumError("nats://a: timeout"), False), (KeyError("x"), True)]
)
def test_an_outage_is_no_fault(
    error: Exception, is_fault: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a line, and looked again; of anything else the traceback is kept."""
    looks: list[int] = []

    async def look(_: Any) -> None:
        looks.append(1)
        raise error

    async def leave(_: Any) -> None:
        """It ends."""

    monkeypatch.setattr(ShardLeases, "_look", look)
    monkeypatch.setattr(ShardLeases, "_leave", leave)
    monkeypatch.setattr(shard_leases, "LOOK_S", 0.0)
    monkeypatch.setattr(shard_leases, "LEAST_S", 0.0)
    leases = ShardLeases.__new__(ShardLeases)
    leases._wanted = asyncio.Event()
    leases.stopping = lambda: len(looks) == 2
    with caplog.at_level(logging.WARNING):
        asyncio.run(leases.watch())
    assert len(looks) == len(caplog.records) == 2
    assert all((record.exc_info is not None) == is_fault for record in caplog.records)
