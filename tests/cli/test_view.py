"""`rollbook view`: a server of its own, which strangers' pages cannot ask, and which ends when told to."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
from tests.fakes.processes.warm import WarmProcess

from rollbook.store import Event, Store
from rollbook.store import events as kinds


def test_it_serves_pages(store: Store) -> None:
    """At the address that it prints, for this host's own browser; SIGINT ends it, with a live page open."""
    with store.writer("serve") as writer:
        writer.append([Event(kinds.TrajectoryOpened("t", "first"), "r")]).result(30)
    words = [sys.executable, "-m", "rollbook", "view", "--store", str(store.path), "--port", "0"]
    process = WarmProcess(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[-1]
        root = address.removesuffix("/view/runs")
        with httpx.Client(base_url=root, timeout=30) as client:
            assert client.get("/", follow_redirects=True).url.path == "/view/runs"
            assert [run["run"] for run in client.get("/view/runs.json").json()["runs"]] == ["r"]
            for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
                assert client.get("/view/runs.json", headers=headers).status_code in (403, 421)
            with client.stream("GET", "/view/live/lines") as lines:
                assert any("first" in line for line in lines.iter_lines())
                process.send_signal(signal.SIGINT)
                assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.communicate()
