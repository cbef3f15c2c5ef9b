"""The servers of this suite: what they say of themselves, and that nothing is left of one that stopped."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.sglang.server import SHARED_MEMORY, SglangServer, group_of, shared_files

from rollbook.engines.sglang.protocol import check_version


def test_the_version_that_is_served(server: SglangServer) -> None:
    """It is told, and new enough."""
    info = server.get("/server_info")
    assert info["version"] == "0.5.23"
    assert check_version(info, server.url) is None


def test_nothing_is_left_of_a_server(models: dict[str, Path], tmp_path: Path) -> None:
    """Stopped while it still starts: no process of its group, no file in shared memory, no listener."""
    server = SglangServer(models["dense"], tmp_path)
    server.start()
    server.ready()
    group = server.process.process.pid
    shared = shared_files(group)
    assert len(group_of(group)) > 2
    assert len(shared) >= 2  # its load, and a semaphore
    server.stop()
    server.stop()
    assert group_of(group) == []
    assert [file for file in shared if file.exists()] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


MAPS = """
import mmap, sys
files = [open(name, "r+b") for name in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""


def test_what_others_map_too_is_left(tmp_path: Path) -> None:
    """A trainer's tensors are not a killed server's to remove."""
    names = [SHARED_MEMORY / f"{tmp_path.parent.name}-{tmp_path.name}-{name}" for name in ("theirs", "ours")]
    try:
        for name in names:
            name.write_bytes(bytes(4096))
        with (
            subprocess.Popen(
                [sys.executable, "-c", MAPS, *map(str, names)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            ) as child,
            names[1].open("r+b") as file,
            mmap.mmap(file.fileno(), 0),
        ):
            assert child.stdout is not None
            assert child.stdout.readline() == b"mapped\n"
            assert shared_files(child.pid) == {names[0]}
            child.kill()
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """With the end of its log, as soon as it has ended."""
    server = SglangServer(tmp_path / "nothing", tmp_path)
    server.start()
    try:
        with pytest.raises(RuntimeError, match=r"(?s)sglang-\d+ ended with .*nothing"):
            server.ready()
    finally:
        server.stop()
