"""A real proxy on a disk that fills up: it says so, loses nothing, and goes on by itself."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.store.upkeep.verify import incomplete_turns, verify_store

pytestmark = pytest.mark.crashes

MIB = 1 << 20


class Disk(Protocol):
    """Where a store lies."""

    folder: Path

    def fill(self, process: int) -> None:
        """Let nothing more be written."""

    def free(self, process: int) -> None:
        """Let it be written again."""


class SmallDisk:
    """A file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, process: int) -> None:
        """Take every free byte."""
        with (self.folder / "filler").open("wb", buffering=0) as file:
            for size in (MIB, 4096):
                _write_all(file, size)

    def free(self, process: int) -> None:
        """Give them back."""
        (self.folder / "filler").unlink()


def _write_all(file: Any, size: int) -> None:
    try:
        while file.write(bytes(size)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


class Limited:
    """A process that may not make any file longer: what is left where nothing can be mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, process: int) -> None:
        """From now on."""
        resource.prlimit(process, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def free(self, process: int) -> None:
        """No longer."""
        resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(params=["small disk", "limit"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A disk that can be filled and freed."""
    if request.param == "small disk":
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield SmallDisk(tmp_path)
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)
            return
    yield Limited(tmp_path)


def _until(what: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _healthy(url: str) -> bool:
    return httpx.get(f"{url}/healthz").status_code == 200


class Talk:
    """One conversation, and what was acknowledged of it."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.messages: list[Any] = []
        self.received: dict[str, str] = {}

    def ask(self, text: str) -> httpx.Response:
        """Go on from the last reply."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": "m", "messages": messages}
        answer = httpx.post(f"{self.url}/t/{self.name}/v1/chat/completions", json=body, timeout=60)
        if answer.status_code == 200:
            [choice] = answer.json()["choices"]
            self.messages = [*messages, choice["message"]]
            self.received[answer.headers["x-rollbook-turn-id"]] = choice["message"]["content"]
        return answer


def test_a_disk_that_is_full_for_a_while(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path, disk: Disk
) -> None:
    """Twice: 503 with a time to wait while it lasts; then all goes on, and the log has what was told."""
    arguments = ["--engine", "scripted", "--script", f"{script}:answer"]
    served = serve("--model", str(text_model("chatml")), *arguments, "--seal", folder=disk.folder / "store")
    talks = [Talk(served.url, f"t{i}") for i in range(3)]
    others: list[Talk] = []
    for round_ in range(2):
        for talk in talks:
            assert talk.ask(f"before {round_}").status_code == 200
        disk.fill(served.process.pid)
        more = [Talk(served.url, f"other-{round_}-{i}") for i in range(100)]
        others += more
        # There may be room that was made before.
        refused = next(a for talk in more if (a := talk.ask("x" * 8000)).status_code != 200)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        health = httpx.get(f"{served.url}/healthz")
        assert health.status_code == 503
        assert any(os.strerror(code) in health.json()["status"] for code in (errno.ENOSPC, errno.EFBIG))
        time.sleep(1.2)  # it tries, and fails
        assert talks[0].ask("still full").status_code == 503
        disk.free(served.process.pid)
        _until(lambda: _healthy(served.url), 15)
        for talk in talks:
            assert talk.ask(f"after {round_}").status_code == 200
    for talk in talks:
        finish = httpx.post(f"{served.url}/v1/trajectories/{talk.name}/finish", json={"reward": 1})
        assert finish.json()["turns"] == len(talk.received)
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "rollbook_store_failures_total 2.0" in metrics
    assert served.stop() == 130
    output = served.log.read_text(errors="replace")
    assert "Traceback" not in output
    assert "sealer ended" not in output
    log = store.open(served.path)
    assert [lane.fault for lane in verify_store(log)] == [None]
    assert list(incomplete_turns(log)) == []
    with store.connect(served.path) as sql:
        rows = sql.execute(
            "select trajectory, turn_id, content, parent_turn_id, root_reason from turns "
            "where status = 'completed' order by turn_id"
        ).fetchall()
    for talk in [*talks, *others]:
        mine = [row[1:] for row in rows if row[0] == talk.name]
        assert {turn_id: content for turn_id, content, *_ in mine} == talk.received
        ids = [turn_id for turn_id, *_ in mine]
        assert [parent for _, _, parent, _ in mine] == [None, *ids[:-1]][: len(ids)]
