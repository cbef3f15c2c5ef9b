"""docs/tail.md: every command of it is run, against a folder and a server, and does what the page says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pytest
import uvicorn
from fastapi import FastAPI
from tests.fakes.processes.warm import WarmProcess

from rollbook import store as rb
from rollbook.edge.bodies import BodyBudget
from rollbook.edge.guard import Guard, add_guards
from rollbook.edge.keys import Keys
from rollbook.edge.web_pages import AllowedHosts
from rollbook.ingest.access import ROUTES
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.routes.event_feed import KEEP_ALIVE_S
from rollbook.ingest.routes.events import PARAMETERS, add_event_routes
from rollbook.store import Store, format_cut

ADDRESS = "http://127.0.0.1:8000"
LINE = re.compile(
    r"\d\d:\d\d:\d\d \S+ +"
    r"(?:(?:opened|finished|reward|v\d+ serves,)  ?\S.*"
    r"|\d+ (?P<hangs>extends \d+|\w+) +"
    r"(?:failed after \d+ ms: .*"
    r"|(?P<tokens>\d+\+\d+) (?P<version>v\d+) +(?P<finish>\w+) +"
    r"\d+ ms +(?P<logprob>-\d\.\d{3}) (?P<reply>\S.*)))"
)
"""A line of `rollbook tail` as the page shows it."""


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The text of docs/tail.md."""
    return (root / "docs" / "tail.md").read_text()


@pytest.fixture
def here(one_of_everything: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A folder to run commands in, with a store named demo-store."""
    shutil.copytree(one_of_everything.path, tmp_path / "demo-store")
    monkeypatch.chdir(tmp_path)
    return rb.open("demo-store")


@pytest.fixture
def url(here: Store) -> Iterator[str]:
    """Address of a server with the tail's routes over demo-store."""
    recorder = Recorder(here, "proxy", "demo")
    app = FastAPI()
    streams = add_event_routes(app, recorder, BodyBudget())
    add_guards(app, Guard(Keys(), ROUTES, recorder.run, None), AllowedHosts(), lambda error: None, error_body)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    streams.stopping = lambda: server.should_exit
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    streams.close()
    recorder.close()


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def _lines(page: str, program: str) -> list[list[str]]:
    lines = [line for block in _blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


def _rollbook(root: Path, words: list[str]) -> WarmProcess:
    code = f"import sys; sys.path.insert(0, {str(root / 'src')!r}); from rollbook.cli.app import main; main()"
    return WarmProcess(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _outputs(commands: list[list[str]], url: str, root: Path) -> list[list[str]]:
    """What each `rollbook` command prints; of the one that follows, as many lines as of the first."""
    outputs: list[list[str]] = []
    for words in commands:
        process = _rollbook(root, [word.replace(ADDRESS, url) for word in words[1:]])
        if "--no-follow" in words:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, "")
            outputs.append(out.splitlines())
            continue
        assert process.stdout is not None
        outputs.append([process.stdout.readline().rstrip("\n") for _ in outputs[0]])
        process.kill()
        process.communicate()
    return outputs


def test_rollbook_commands_print_what_the_page_says(page: str, url: str, here: Store, root: Path) -> None:
    """Each command prints what the page says; the following one is stopped after its first lines."""
    whole, each, some, rest, remote = _outputs(_lines(page, "rollbook"), url, root)
    events = list(here.events())
    assert [line.split()[2] for line in each] == [f"{e.lane}={e.seq}" for e in events]
    assert remote == whole
    assert {line.split()[3] for line in some} == {"turn.failed", "reward.assigned"}
    left = [e.event_id for e in events if e.lane != "serve" or e.seq >= 20]
    assert [orjson.loads(line)["event_id"] for line in rest] == left


def test_the_example_lines_are_what_tail_prints(page: str, url: str, here: Store, root: Path) -> None:
    """Of the events those that tell of turns and outcomes have a line; it has what the page says it has."""
    [whole] = _outputs(_lines(page, "rollbook")[:1], url, root)
    kinds = [e.kind for e in here.events()]
    printed = ("turn.completed", "turn.failed", "trajectory.opened", "trajectory.finished", "reward.assigned")
    assert len(whole) == 1 + sum(kinds.count(kind) for kind in (*printed, "policy.activated"))
    [shown] = _blocks(page, "text")
    for lines in (shown.splitlines(), whole):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d UTC", lines[0])
        assert [line for line in lines[1:] if not LINE.fullmatch(line)] == []
    turns = [match for line in whole if (match := LINE.fullmatch(line)) and match["tokens"]]
    assert [m["hangs"] for m in turns] == ["first_turn", "extends 1"] * 4
    assert {(m["tokens"], m["version"], m["finish"], m["reply"]) for m in turns} == {
        *(("2+2", f"v{v}", "stop", "four") for v in (0, 1)),
        *(("5+2", f"v{v}", "stop", "4") for v in (0, 1)),
    }
    assert {m["logprob"] for m in turns} == {"-6.250", "-0.300"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_commands_read_events_and_move_a_cursor(page: str, url: str, here: Store) -> None:
    """The curl commands read events as SSE and as Arrow, and commit a cursor."""
    commands = _lines(page, "curl")
    assert len(commands) == 4
    head = format_cut(here.head())
    outputs = [
        subprocess.run(
            [word.replace(ADDRESS, url) for word in words],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
        for words in commands
    ]
    assert outputs[0].startswith("id: ")
    assert outputs[0].endswith(f'event: head\nid: {head}\ndata: {{"cut":"{head}"}}\n\n')
    with pa.ipc.open_stream("events.arrow") as stream:
        assert "lane" in stream.read_all().schema.names
    assert outputs[2:] == ['{"cut":"serve=20"}'] * 2
    assert [e.lane for e in here.events() if e.kind == "cursor.moved"] == ["proxy", "upkeep"]


def test_the_remote_tail_example_runs(page: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The block that needs a server runs against one."""
    [block] = [b for b in _blocks(page, "python") if "HttpTail" in b]
    exec(compile(block.replace(ADDRESS, url), "docs/tail.md", "exec"), {})
    assert re.fullmatch(r"[1-9]\d* \{.*'serve': \d+.*\}\n", capsys.readouterr().out)


def test_query_parameters_and_keep_alive_match_the_code(page: str) -> None:
    """The page lists every query parameter, and the interval of keep-alive comments is the code's."""
    table = page.split("| query | meaning | default |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == PARAMETERS
    assert f"every {KEEP_ALIVE_S:.0f} s" in page
