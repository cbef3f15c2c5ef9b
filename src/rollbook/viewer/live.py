"""Agents at work, live: a line per turn as it becomes durable, what is open, and what waits longest.

One reader follows the log for all live pages, while there is one: ten pages cost the log what one costs. The
newest lines are kept in bounded memory; a page that falls behind them misses some, and is told how many.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import orjson
from fastapi import FastAPI
from markupsafe import escape
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollbook.store.cut import Cut
from rollbook.store.events import (
    Event,
    LaunchEnded,
    LaunchStarted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.log.tail import Filter
from rollbook.transcript.traffic import KINDS, Traffic, Words
from rollbook.viewer.launches import LaunchBoard, Launches
from rollbook.viewer.pages import Page, Part, Query
from rollbook.viewer.rendering import link
from rollbook.viewer.snapshots import Snapshot, Snapshots

logger = logging.getLogger(__name__)
KEPT = 2_000
"""Lines that are kept for pages that come, or come again."""
BEFORE = 400
"""Events of each lane before the head with which a reader begins."""
POLLED = 256
GATHER_S = 0.1
"""Pause behind each message: what comes meanwhile is one message, however many lines it is."""
QUIET_S = 15.0
"""A page without a line for so long is sent a comment, so that proxies keep its connection."""
IDLE_S = 10.0
"""The reader ends once no page has been open for so long."""
LISTED = 20
FOLLOWED = KINDS | {LaunchStarted.KIND, LaunchEnded.KIND}
_OPEN = """
    SELECT trajectory_id, trajectory AS name, run, epoch_us(opened) AS opened_us, turns
    FROM trajectories WHERE status = 'open'"""


@dataclass(frozen=True, slots=True)
class LiveLine:
    """A line, with what pages select lines by."""

    number: int
    run: str
    failed: bool
    html: str


@dataclass(slots=True)
class _Running:
    name: str
    run: str
    opened_us: int
    turns: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    """Turn that runs -> when it was asked."""


@dataclass(frozen=True, slots=True)
class OpenTrajectory:
    """An open trajectory: since when its oldest running turn waits; null: its agent is at work."""

    trajectory_id: str
    name: str
    run: str
    opened: datetime
    turns: int
    waiting_since: datetime | None


class LiveReader:
    """Follows the log from a thread of its own, while pages are open.

    Args:
        prefix: of links.
        rollouts: folder of the launches' folders; None: what agents print is not shown.
    """

    def __init__(self, snapshots: Snapshots, prefix: str, rollouts: Path | None = None) -> None:
        self._snapshots, self._prefix = snapshots, prefix
        self._board = LaunchBoard(rollouts)
        self._lines: deque[LiveLine] = deque(maxlen=KEPT)
        self._open: dict[str, _Running] = {}
        self._known: Cut = {}
        """What `_open` began with holds this."""
        self._count = self._pages = 0
        self._left_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: set[Callable[[], object]] = set()

    # For pages --------------------------------------------------------------------------------------

    async def lines(self, after: int, run: str | None, failed: bool) -> AsyncIterator[bytes]:
        """Server-sent events of lines behind a number, for ever."""
        grown, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(grown.set)

        self._enter(wake)
        try:
            while True:
                grown.clear()
                if lines := self._behind(after):
                    missed = lines[0].number - after - 1 if after >= 0 else 0
                    after = lines[-1].number
                    wanted = (
                        line for line in lines if run in (None, line.run) and (line.failed or not failed)
                    )
                    shown = [line.html for line in wanted]
                    yield _message(after, shown, missed)
                    await asyncio.sleep(GATHER_S)
                    continue
                try:
                    async with asyncio.timeout(QUIET_S):
                        await grown.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._leave(wake)

    def _behind(self, after: int) -> list[LiveLine]:
        """The lines behind a number, of those that are kept."""
        with self._lock:
            newest = list(islice(reversed(self._lines), max(self._count - max(after, 0), 0)))
        return newest[::-1]

    def open_trajectories(self, run: str | None) -> list[OpenTrajectory]:
        """Those that are open, as far as they were seen: whose turn waits longest first."""
        with self._lock:
            known = [
                OpenTrajectory(
                    trajectory_id,
                    running.name,
                    running.run,
                    _time(running.opened_us),
                    running.turns,
                    _time(min(running.asked.values())) if running.asked else None,
                )
                for trajectory_id, running in self._open.items()
                if run in (None, running.run)
            ]
        return sorted(known, key=lambda one: (one.waiting_since is None, one.waiting_since or one.opened))

    def launches(self, run: str | None) -> Launches:
        """Those that run, and that ended last."""
        with self._lock:
            return self._board.launches(run)

    def _enter(self, wake: Callable[[], object]) -> None:
        with self._lock:
            self._pages += 1
            self._waiting.add(wake)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="live-pages", daemon=True)
                self._thread.start()

    def _leave(self, wake: Callable[[], object]) -> None:
        with self._lock:
            self._pages -= 1
            self._waiting.discard(wake)
            self._left_s = time.monotonic()

    # The thread -----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        with self._snapshots.reading() as snapshot:
            cut = dict(snapshot.cut)
            start = {lane: max(count - BEFORE, 0) for lane, count in cut.items()}
            known = {row.pop("trajectory_id"): _Running(**row) for row in snapshot.rows(_OPEN)}
            self._board.begin(snapshot)
        with self._lock:
            self._open = known
            self._known = cut
        traffic = Traffic()
        with self._snapshots.store.tail(start, Filter(FOLLOWED)) as tail:
            # Lanes are read one after the other: at first by the clock, as they came.
            self._take(traffic, sorted(tail.poll(), key=lambda event: event.time_us))
            while not self._unwatched():
                if events := tail.poll(POLLED):
                    self._take(traffic, events)
                else:
                    tail.wait(0.5)

    def _unwatched(self) -> bool:
        """Whether no page is open, nor was of late; then the thread is to end."""
        with self._lock:
            over = not self._pages and time.monotonic() - self._left_s > IDLE_S
            if over:
                self._thread = None
                self._lines.clear()
                self._open.clear()
            return over

    def _take(self, traffic: Traffic, events: Sequence[Event]) -> None:
        made = []
        for event in events:
            trajectory_id = str(getattr(event.record, "trajectory_id", ""))
            failed = isinstance(event.record, TurnFailed)
            for words in _words(traffic, event):
                text = "".join(f'<span class="{style}">{escape(text)}</span>' for text, style in words)
                to = link(self._prefix, "trajectories", trajectory_id) if trajectory_id else ""
                html = f'<a href="{escape(to)}">{text}</a>' if to else f"<span>{text}</span>"
                made.append((event.run, failed, html))
        with self._lock:
            for event in events:
                self._keep(event)
            for run, failed, html in made:
                self._count += 1
                self._lines.append(LiveLine(self._count, run, failed, html))
            waiting = list(self._waiting)
        for wake in waiting:
            wake()

    def _keep(self, event: Event) -> None:
        """Note what is open, and what of it waits."""
        new = event.seq >= self._known.get(event.lane, 0)
        match event.record:
            case LaunchStarted(trajectory_id=of) | LaunchEnded(trajectory_id=of) if new:
                self._board.take(event, self._open[of].name if of in self._open else "")
            case TrajectoryOpened() as opened if new:
                self._open[opened.trajectory_id] = _Running(opened.name, event.run, event.time_us)
            case TrajectoryFinished(trajectory_id=ended):
                self._open.pop(ended, None)
            case TurnRequested() as requested if running := self._open.get(requested.trajectory_id):
                running.asked[requested.turn_id] = event.time_us
            case TurnCompleted() | TurnFailed() as done if running := self._open.get(done.trajectory_id):
                running.asked.pop(done.turn_id, None)
                running.turns += new and isinstance(done, TurnCompleted)


def _words(traffic: Traffic, event: Event) -> Sequence[Words]:
    """The lines of an event; of one that a reader cannot print, which. It ends no live page."""
    try:
        return list(traffic.lines(event))
    except Exception:
        logger.warning("event %s cannot be shown on the live page", event.event_id, exc_info=True)
        return [[("red", f"{event.kind} {event.event_id}: it cannot be shown")]]


def _time(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us / 1e6, UTC).replace(tzinfo=None)


def _message(number: int, lines: Sequence[str], missed: int) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (number, orjson.dumps({"lines": lines, "missed": missed}))


# The pages --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Live:
    """The live page: of one run, or of all; with what failed alone, or with everything."""

    run: str | None
    failed: bool
    runs: Sequence[str]


def read_live(snapshot: Snapshot, query: Query) -> Live:
    """The frame of the live page; its lines come by themselves."""
    runs = [row["run"] for row in snapshot.rows("SELECT DISTINCT run FROM runs ORDER BY run")]
    return Live(query.get("run") or None, query.get("failed") == "1", runs)


@dataclass(frozen=True, slots=True)
class OpenNow:
    """What is open, whose turn waits longest first; `count`: of them."""

    count: int
    trajectories: Sequence[OpenTrajectory]


def add_live(app: FastAPI, reader: LiveReader) -> tuple[Part, Part]:
    """Add the stream of lines; the pages of what is open, and of launches."""

    async def stream(request: Request) -> Response:
        query = request.query_params
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isdigit() else -1
        lines = reader.lines(after, query.get("run") or None, query.get("failed") == "1")
        return StreamingResponse(lines, media_type="text/event-stream")

    def read_open(query: Query) -> OpenNow:
        known = reader.open_trajectories(query.get("run") or None)
        return OpenNow(len(known), known[:LISTED])

    app.add_route("/live/lines", stream, methods=["GET"])
    return (
        Part("/live/open", "open.html", read_open),
        Part("/live/launches", "launches.html", lambda query: reader.launches(query.get("run") or None)),
    )


PAGES = (Page("/live", "live.html", read_live),)
