"""Loopback ports for servers that are told which port to take."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(18_000, 30_000)


def free_port() -> int:
    """A loopback port that nobody listens on now, and that no connection takes before its server does.

    It is below those that the kernel gives to outgoing connections: a server may take a minute to start,
    or be away between a kill and its restart. Drawn without a seed: processes with one seed would draw one
    port, and one would speak to the other's server.
    """
    while True:
        wanted = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return wanted
