"""The servers of this suite: what they say of themselves, and that nothing is left of one that stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.sglang.server import SglangServer, group_of, shared_files

from rollbook.ingest.engines.sglang_wire import check_version


def test_the_version_that_is_served(server: Any) -> None:
    """It is told, and new enough."""
    told = server.get("/server_info")
    assert told["version"] == "0.5.23"
    assert check_version(told, server.url) is None


def test_nothing_is_left_of_a_server(models: Any, tmp_path: Path) -> None:
    """Stopped while it still starts: no process of its group, no file in shared memory, no listener."""
    one = SglangServer(models["dense"], tmp_path)
    one.start()
    one.ready()
    group = one.process.process.pid
    shared = shared_files(group)
    assert len(group_of(group)) > 2
    assert len(shared) >= 2  # its load, and a semaphore
    one.stop()
    one.stop()
    assert group_of(group) == []
    assert [file for file in shared if file.exists()] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{one.url}/health")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """With the end of its log, as soon as it has ended."""
    one = SglangServer(tmp_path / "nothing", tmp_path)
    one.start()
    try:
        with pytest.raises(RuntimeError, match=r"(?s)sglang-\d+ ended with .*nothing"):
            one.ready()
    finally:
        one.stop()
