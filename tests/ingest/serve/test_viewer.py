"""The viewer beside a proxy: a process of its own, begun by the first page, ended with the proxy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from tests.fakes.proxies.served import Served

from rollbook import store as rb
from rollbook.edge.keys import add_key

SCRIPTED = ("--engine", "scripted", "--script")


def _viewers(proxy: Served) -> list[psutil.Process]:
    """The viewer processes of a proxy's store."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "view" in (words := process.info["cmdline"] or []) and str(proxy.path) in words
    ]


def test_pages_of_a_proxy(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, tmp_path: Path
) -> None:
    """For readers; a judge's word is in the log in its name; one that dies comes back."""
    file = tmp_path / "keys.toml"
    keys = {role: add_key(file, f"{role}-1", role, None) for role in ("reader", "judge", "writer")}
    proxy = serve(*SCRIPTED, f"{script}:answer", "--model", str(text_model("chatml")), "--keys", str(file))

    def asked(path: str, role: str, body: object = None) -> httpx.Response:
        method = "GET" if body is None else "POST"
        return httpx.request(method, proxy.url + path, auth=("me", keys[role]), json=body, timeout=60)

    assert _viewers(proxy) == []
    refused = httpx.get(f"{proxy.url}/view/runs")
    assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
    page = asked("/view/runs", "reader")
    assert page.status_code == 200, page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    opened = httpx.post(
        f"{proxy.url}/v1/trajectories", json={"id": "t"}, headers={"x-api-key": keys["writer"]}
    ).json()["trajectory_id"]
    body = {"reward": 0.5, "source": "human"}
    assert asked(f"/view/trajectories/{opened}/rewards", "reader", body).status_code == 403
    assert asked(f"/view/trajectories/{opened}/rewards", "judge", body).status_code == 201
    assert asked("/view/runs", "judge").status_code == 403
    with rb.connect(proxy.path) as connection:
        rewards = connection.execute("SELECT run, lane, reward, key FROM rewards").fetchall()
    assert rewards == [("default", "view", 0.5, "judge-1")]
    [viewer] = _viewers(proxy)
    os.kill(viewer.pid, signal.SIGKILL)
    assert asked(f"/view/trajectories/{opened}", "judge").status_code == 200
    [viewer] = _viewers(proxy)
    words = viewer.cmdline()
    folder = Path(words[words.index("--socket") + 1]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with httpx.stream(
        "GET", f"{proxy.url}/view/live/lines", auth=("me", keys["reader"]), timeout=60
    ) as lines:
        assert next(lines.iter_lines())
        begun = time.monotonic()
        assert proxy.stop() in (0, 130)
        assert time.monotonic() - begun < 8
    viewer.wait(60)
    assert not folder.exists()
