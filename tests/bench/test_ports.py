"""Ports of servers that take a while to start."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import pytest

from rollbook.testing.asgi import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(sys.platform != "linux", reason="the range is told in /proc")
def test_no_connection_takes_it() -> None:
    """It is below those that the kernel gives to outgoing connections."""
    assert free_port() < int(RANGE.read_text().split()[0])


def test_one_seed_two_ports() -> None:
    """Processes that seed alike draw different ports."""
    drawn = set()
    for _ in range(5):
        random.seed(0)
        drawn.add(free_port())
    assert len(drawn) > 1


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another is drawn, as for one that was drawn before."""
    drawn = free_port()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        taken = listener.getsockname()[1]
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        draws = iter([taken, drawn, free])
        monkeypatch.setattr(random.SystemRandom, "choice", lambda *_: next(draws))
        assert free_port() == free
