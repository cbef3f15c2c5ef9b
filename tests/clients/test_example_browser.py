"""examples/browser: an agent of browser-use, in a real Chromium, on a page of this host."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.examples.played import CLIENTS, EXAMPLES, Played, lines_of_ours, play

pytestmark = pytest.mark.timeout(600)


def _says(action: str, **fields: object) -> str:
    """A reply as browser-use reads it."""
    return json.dumps({"memory": "-", "action": [{action: fields}]}, separators=(",", ":"))


SAYINGS = (
    *(_says("click", index=2), _says("click", index=3)),
    *(_says("done", text=text, success=True) for text in ("LAMP-40", "It has none.")),
)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the page is."""
    handler = functools.partial(_Quiet, directory=EXAMPLES / "browser")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def played(address: str, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The rollouts of one task, and a step."""
    if shutil.which("chromium") is None:
        assert os.environ.get("ROLLBOOK_BROWSER") != "required", "there is no chromium"
        pytest.skip("there is no chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    tasks = (EXAMPLES / "browser" / "tasks.jsonl").read_text().replace("127.0.0.1:8123", address)
    (folder / "tasks.jsonl").write_text(tasks)
    command = f'["{CLIENTS}/browser_use/bin/python", "examples/browser/agent.py", "{{prompt}}"]'
    settings = ["limit=1", 'tasks="tasks.jsonl"', f"agent.command={command}"]
    return play(folder, "browser", ["rollouts"], SAYINGS, *settings)


def test_each_look_at_the_page_is_a_sample(played: Played) -> None:
    """browser-use shows its model the page as it is now, and not the pages before: its turns are roots."""
    assert played.said["rollouts"]["done"] == 4
    rows = played.asked("SELECT count(*), min(fidelity), bool_and(reward IN (0, 1)) FROM trajectories")
    assert rows == [(4, "exact", True)]
    turns = played.asked("SELECT count(*), count(*) FILTER (parent_turn_id IS NULL) FROM turns")
    [(leaves,)] = played.asked("SELECT count(*) FROM paths")
    assert turns == [(leaves, leaves)]


def test_its_step_replays_bit_for_bit(played: Played) -> None:
    """Of the one group."""
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 4


def test_no_line_is_changed() -> None:
    """It knows nothing of Rollbook."""
    assert lines_of_ours("browser/agent.py") == []
