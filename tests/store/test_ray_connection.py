"""A real Ray that is started here: it listens on the loopback alone, and refuses who has not its token."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.store import ray_connection
from rollbook.store.errors import ConfigError
from rollbook.store.ray_connection import ADDRESS, MODE, TOKEN, TOKEN_PATH, connect

OF_RAY = (ADDRESS, MODE, TOKEN, TOKEN_PATH, ray_connection.ONE_HOST, "RAY_TMPDIR")
JOINS = """
from rollbook.store.ray_connection import connect
connect("rollbook")
import ray
print("in", [node["NodeManagerAddress"] for node in ray.nodes()])
"""


def _listeners() -> set[tuple[str, int]]:
    """The addresses and ports that this process and its children listen on."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def earlier() -> set[tuple[str, int]]:
    """What listens before Ray is started: ranks of other tests, which met in this process, still do."""
    return _listeners()


@pytest.fixture(scope="module")
def started(earlier: set[tuple[str, int]]) -> Iterator[Path]:
    """Ray, as a command starts it; the file of its token."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_RAY:
            patch.delenv(name, raising=False)
        handler = signal.getsignal(signal.SIGTERM)
        leave = connect("rollbook")
        assert leave is not None
        assert signal.getsignal(signal.SIGTERM) is handler
        token = Path(os.environ[TOKEN_PATH])
        try:
            yield token
        finally:
            leave()
        assert [name for name in OF_RAY if name in os.environ] == []
        assert not token.parent.exists()


def _joins(**changes: str | None) -> subprocess.Popen[str]:
    """Another process that connects to the cluster of its environment, which is this one's but for this."""
    variables = {**os.environ, "RAY_NUM_REDIS_GET_RETRIES": "2", **changes}
    return subprocess.Popen(
        [sys.executable, "-c", JOINS],
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ranks
def test_it_listens_on_the_loopback(started: Path, earlier: set[tuple[str, int]]) -> None:
    """All of its processes, workers among them."""
    import ray

    assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()
    addresses = _listeners() - earlier
    assert len(addresses) > 5
    assert {ip for ip, _port in addresses} == {"127.0.0.1"}


@pytest.mark.ranks
def test_its_token_is_this_users_alone(started: Path) -> None:
    """In a folder of its own."""
    assert stat.S_IMODE(started.stat().st_mode) == 0o600
    assert stat.S_IMODE(started.parent.stat().st_mode) == 0o700
    assert len(started.read_text()) == 64


@pytest.mark.ranks
def test_strangers_are_refused(started: Path) -> None:
    """Without the token and with another one; who inherits it is let in."""
    cases: Mapping[str, Mapping[str, str | None]] = {
        "child": {},
        "without": {MODE: "disabled", TOKEN_PATH: None},
        "another": {TOKEN: "0" * 64, TOKEN_PATH: None},
    }
    joining = {name: _joins(**changes) for name, changes in cases.items()}
    output = {name: process.communicate(timeout=120)[0] for name, process in joining.items()}
    assert "in ['127.0.0.1']" in output["child"]
    for name in ("without", "another"):
        assert joining[name].returncode != 0
        assert "ConnectionError: Ray cannot be reached or started:\n  " in output[name]


def test_a_cluster_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is one is noted in a folder that anybody may make."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not ray_connection._started_by_user()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    assert ray_connection._started_by_user()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    os.chown(tmp_path / "ray" / "ray_current_cluster", 4243, -1) if os.getuid() == 0 else None
    assert not ray_connection._started_by_user()


def test_a_users_own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is joined as the user's variables say, none of which is changed; and what it answers is told."""
    calls: list[dict[str, Any]] = []

    class Ray:
        class exceptions:
            RayError = OSError

        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def init(*words: str, **options: Any) -> None:
            calls.append({"words": words, **options})
            raise RuntimeError("no\n\n such token")

    monkeypatch.setitem(sys.modules, "ray", Ray)
    monkeypatch.setenv(ADDRESS, "10.0.0.1:6379")
    monkeypatch.setenv(TOKEN, "theirs")
    before = dict(os.environ)
    with pytest.raises(ConnectionError, match=r"reached or started:\n  no\n  such token"):
        connect("rollbook")
    assert calls == [{"words": (), "namespace": "rollbook", "log_to_driver": False, "logging_level": 40}]
    assert dict(os.environ) == before


def test_there_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said how there is."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollbook\[ray\]'"):
        connect()
