"""Every page of the viewer, asked of a process of `rollbook view` over HTTP, as a browser asks.

The time of a page is what its server takes: from the request's first byte to the reply's last one,
compressed, over a connection that is there. A path is asked for many steps, trajectories and tokens,
spread over the log, so that no page is one that was just shown; what all pages of a log have in common
is warm.
"""

from __future__ import annotations

import gzip
import io
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

from rollbook import store
from rollbook.bench.processes import BenchError, Process
from rollbook.bench.scale_commands import OFFLINE, command
from rollbook.bench.scale_turns import POLICY, RUN
from rollbook.store import Store
from rollbook.viewer.app import PAGES, PREFIX
from rollbook.viewer.snapshots import FRESH_S

OPEN_PAGE = "/live/open"
LIVE_PARTS = {OPEN_PAGE: 2.0, "/live/launches": 3.0}
"""Parts of the live page, which have no place in `PAGES`; and every how many seconds it asks for each."""
VARIANTS: Mapping[str, Sequence[str]] = {
    "/compare/steps": ("left={run}/{policy}/{step}&right={run}/{policy}/{after}",),
    "/compare/tasks": ("", "left_last={step}&right_first={step}"),
    "/compare/trajectories": ("left={trajectory_id}", "left={trajectory_id}&right={other_id}"),
    "/runs/{run}/steps/{policy}": ("", "before=500"),
    "/runs/{run}/steps/{policy}/{step}/samples": ("", "by=advantage"),
    "/runs/{run}/steps/{policy}/{step}/what-if": ("set=algorithm.name=rloo",),
    "/trajectories": (
        *("", "by=best", "by=worst", "by=longest", "by=slowest", "before={trajectory_id}"),
        *("run={run}&split=train&status=completed", "group=group-{number}", "version={step}&least=0.5"),
    ),
    "/trajectories/{trajectory_id}/samples/{turn_id}": ("", "run={run}&policy={policy}&step={step}"),
    "/trajectories/{trajectory_id}/samples/{turn_id}/colours": ("by=mask", "by=advantage&step={step}"),
    "/trajectories/{trajectory_id}/samples/{turn_id}/tokens/{place}": ("", "step={step}"),
}
"""Path -> what may stand behind its question mark; a path that is not here is asked without."""
SPARE = 3
"""Steps at the end that are not asked for: they are supervised ones, of two samples."""
PART = re.compile(r"\{\w+\}")
GZIP = b"\x1f\x8b"
TIMEOUT_S, MARGIN_S = 180.0, 0.1


@dataclass(frozen=True, slots=True)
class Named:
    """Something that the log has, of which every path can speak: a sample of a step, and another
    trajectory of it."""

    number: int
    step: int
    trajectory_id: str
    turn_id: str
    other_id: str

    def address(self, path: str, query: str) -> str:
        """The address of a path for it.

        Raises:
            BenchError: the path has a part of which nothing is known.
        """
        ids = {"trajectory_id": self.trajectory_id, "turn_id": self.turn_id, "other_id": self.other_id}
        numbers = {
            "number": self.number,
            "step": self.step,
            "after": self.step + 1,
            "place": 100 + self.number,
        }
        values = {name: quote(str(value)) for name, value in (ids | numbers).items()}
        values |= {"run": RUN, "policy": POLICY}
        try:
            return PREFIX + path.format(**values) + ("?" if query else "") + query.format(**values)
        except KeyError as error:
            raise BenchError(f"the page {path} has a part {error}: say here what stands for it") from None


def things(log: Store, count: int) -> list[Named]:
    """So many samples of steps, spread over the run; each step's is one of a trajectory's last turn."""
    query = """
        SELECT step, arg_min(trajectory_id, trajectory_id) AS trajectory_id,
               arg_min(turn_id, trajectory_id) AS turn_id, max(trajectory_id) AS other_id
        FROM samples WHERE step IN (SELECT unnest($steps)) GROUP BY step ORDER BY step"""
    with store.connect(log.path) as connection:
        [[steps]] = connection.execute("SELECT max(step) + 1 FROM steps").fetchall()
        last = max(steps - SPARE, 1)
        wanted = sorted({at * last // count for at in range(count)})
        rows = connection.execute(query, {"steps": wanted}).fetchall()
    return [Named(number, *row) for number, row in enumerate(rows)]


def visits() -> list[tuple[str, str]]:
    """(path, query) of every page."""
    paths = [*(page.path for page in PAGES), *LIVE_PARTS]
    return [(path, query) for path in paths for query in VARIANTS.get(path, ("",))]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a page was, compressed, and how many seconds that took."""

    body: bytes
    seconds: float


class Viewer:
    """A process of `rollbook view`.

    Attributes:
        process: the process; url: its address.
        ready_s: from its start until it said where it is.
        begun: when it was started, by the performance counter.
    """

    def __init__(self, log: Path, scratch: Path, cores: str = "all", *words: object) -> None:
        self.begun = time.perf_counter()
        view = command("view", "--store", log, "--port", 0, *words)
        self.process = Process("view", view, scratch, cores, OFFLINE)
        try:
            announced = self.process.line().decode()
        except BaseException:
            self.process.stop()
            raise
        self.ready_s = time.perf_counter() - self.begun
        self.url = announced.rpartition(" ")[2].removesuffix(f"{PREFIX}/runs")
        self._host = urlsplit(self.url).netloc
        self._watched: HTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._watched is not None:
            self._watched.close()
        self.process.stop()

    def ask(self, address: str) -> Reply:
        """The reply at an address, which is compressed.

        Raises:
            BenchError: it is not 200.
        """
        connection = HTTPConnection(self._host, timeout=TIMEOUT_S)
        with closing(connection):
            connection.connect()
            begun = time.perf_counter()
            connection.request("GET", address, headers={"Accept-Encoding": "gzip"})
            response = connection.getresponse()
            body = response.read()
            reply = Reply(body, time.perf_counter() - begun)
        if response.status != 200:
            raise self.process.failed(f"answered {address} with {response.status}: {text_of(reply)}")
        return reply

    def watch(self) -> None:
        """Open a live page, so that there is something to say of what is open; wait for its first line."""
        connection = HTTPConnection(self._host, timeout=TIMEOUT_S)
        connection.request("GET", f"{PREFIX}/live/lines")
        self._watched = connection.getresponse()
        self._watched.readline()


def text_of(reply: Reply) -> str:
    """What a reply says; short ones are not compressed."""
    compressed = reply.body[:2] == GZIP
    return (gzip.decompress(reply.body) if compressed else reply.body).decode()


@dataclass(frozen=True, slots=True)
class Asked:
    """A page, as often as it was asked for: seconds of each reply.

    Attributes:
        page: its path and query, with a star for each part that differs from ask to ask.
        first_s: of the first one, by a process that had not shown the page before.
        cpu_s: of the server, for a reply, on average; other work on the machine does not change it.
        bytes: the most that it was, compressed.
    """

    page: str
    first_s: float
    warm_s: Sequence[float]
    cpu_s: float
    bytes: int


def ask_pages(
    viewer: Viewer, named: Sequence[Named], asks: int, seconds: float, on_page: Callable[[], None]
) -> list[Asked]:
    """Ask for each page so often, or for so many seconds if they end before that.

    Raises:
        BenchError: a page is not answered with 200, or a path has a part that nothing stands for.
    """
    asked = []
    for path, query in visits():
        if path == OPEN_PAGE:
            viewer.watch()
        first, replies = viewer.ask(named[0].address(path, query)).seconds, list[Reply]()
        cpu, deadline = viewer.process.cpu_s(), time.monotonic() + seconds
        for number in range(1, asks + 1):
            replies.append(viewer.ask(named[number % len(named)].address(path, query)))
            if time.monotonic() > deadline:
                break
        cpu = (viewer.process.cpu_s() - cpu) / len(replies)
        page = PART.sub("*", path + ("?" if query else "") + query)
        largest = max(len(reply.body) for reply in replies)
        asked.append(Asked(page, first, [reply.seconds for reply in replies], cpu, largest))
        on_page()
    return asked


def ask_grown(viewer: Viewer, named: Sequence[Named], grow: Callable[[], object]) -> dict[str, float]:
    """Page -> seconds of its reply just after the log grew, once a page may no longer show what it was."""
    seconds = {}
    for number, path in enumerate({path: None for path, _ in visits()}):
        grow()
        time.sleep(FRESH_S + MARGIN_S)
        address = named[number % len(named)].address(path, VARIANTS.get(path, ("",))[0])
        seconds[PART.sub("*", path)] = viewer.ask(address).seconds
    return seconds


@dataclass(frozen=True, slots=True)
class Cold:
    """A new process: seconds from its start until it listened, and until its first page was there.

    Attributes:
        cpu_s: that it took by then, which the machine's other work does not change.
    """

    ready_s: float
    page_s: float
    cpu_s: float


def start_cold(log: Path, scratch: Path, cores: str) -> Cold:
    """Start a process of `rollbook view` and ask for the first page."""
    with Viewer(log, scratch, cores) as viewer:
        viewer.ask(f"{PREFIX}/runs")
        return Cold(viewer.ready_s, time.perf_counter() - viewer.begun, viewer.process.cpu_s())


def search(viewer: Viewer, words: str, hits: int) -> float:
    """Seconds of a search, whose page shows at least so many hits.

    Raises:
        AssertionError: it shows fewer.
    """
    reply = viewer.ask(f"{PREFIX}/trajectories?q={quote(words)}")
    shown = text_of(reply).count("<mark>")
    assert shown >= hits, f"a search for {words!r} shows {shown} hits, and there are {hits}"
    return reply.seconds


# What is shipped ----------------------------------------------------------------------------------------


def shipped_bytes(folder: Path) -> int:
    """Bytes that a folder's files add to a wheel, which is a zip file, with their names."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in _files(folder):
            wheel.write(path, path.relative_to(folder.parent))
    return len(file.getvalue())


def script_lines(folder: Path) -> int:
    """Lines of the viewer's own scripts: all but those of others."""
    scripts = [
        path for path in _files(folder / "static") if path.suffix == ".js" and "vendor" not in path.parts
    ]
    assert scripts, f"no script in {folder}"
    return sum(len(path.read_text().splitlines()) for path in scripts)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
