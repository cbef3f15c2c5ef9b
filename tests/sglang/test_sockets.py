"""Where a real SGLang listens, started as the pages start it: what docs/security.md says to close.

What of it is on all interfaces is SGLang's and torch's to change: one day the page is wrong.
"""

from __future__ import annotations

import psutil
from tests.sglang.server import SglangServer

EVERYWHERE = {"0.0.0.0", "::"}


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process and those that it started listen for TCP."""
    root = psutil.Process(pid)
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_where_it_listens(servers: dict[str, SglangServer]) -> None:
    """Its port is at the address that it was told; the store of its own ranks is on all interfaces."""
    server = servers["dense"]
    addresses = listening(server.process.process.pid)
    assert ("127.0.0.1", server.port) in addresses
    assert len([ip for ip, _ in addresses if ip in EVERYWHERE]) == 1
