"""What starts of a run leave on this host, and how it is ended: the mark of all that a start begins,
the guard that ends what outlives it, and what an earlier start left running, found by the locks it
holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from rollbook import store
from rollbook.online import guard
from rollbook.online.config import WholeConfig
from rollbook.online.guard import GRACE_S, INSIST_S, end_all, marked
from rollbook.rollouts.launchers.cgroups import start_of
from rollbook.rollouts.launchers.isolation import interpreter
from rollbook.rollouts.launchers.reaper import command_of
from rollbook.rollouts.manager import lock_of
from rollbook.store.errors import LaneLockedError
from rollbook.store.patience import SAY_AFTER_S, Patience, waits
from rollbook.store.whose import START

ENDED_S = GRACE_S + INSIST_S
"""So long what an earlier start left is waited for: its guard is at work."""
ASKED_S = 30.0
"""So long a run that is taken over may take to end in order."""
SAID_S = 1.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Left:
    """A process that holds a lock which this start needs.

    Attributes:
        holds: what it does alone.
        mark: of the start of a run that it belongs to; None: it was started by itself.
        keeps: it is `rollbook run`, and keeps its parts running.
    """

    pid: int
    holds: str
    mark: str | None
    keeps: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({_command(self.pid) or 'perhaps of another host'}), {self.holds}"


def keeping(part: str, run: str) -> str:
    """The name of the claim that `rollbook run` holds for a part of a run, for as long as it runs."""
    return f"keeping the {part} of run {run} running"


@contextlib.contextmanager
def alone(config: WholeConfig, parts: Sequence[str]) -> Iterator[None]:
    """Context: no other `rollbook run` keeps these parts of this run.

    Raises:
        LaneLockedError: another one does.
    """
    with contextlib.ExitStack() as claims:
        if "proxy" in parts or config.serve.store.exists():
            log = store.open(config.serve.store, create=True)
            for part in parts:
                what = keeping(part, config.run)
                claims.enter_context(log.claim(what, "give that one --only for other parts"))
        yield


def left_of(config: WholeConfig, parts: Sequence[str]) -> list[Left]:
    """The processes that hold what these parts of the run need."""
    run, left = config.run, list[Left]()
    wanted: dict[str, Callable[[str], bool]] = {
        "proxy": lambda what: what.partition(", proxy ")[0] == f"recording run {run}",
        "trainer": lambda what: what.startswith("training policy ") and what.endswith(f" of run {run}"),
    }
    claims = sorted((config.serve.store / "claims").glob("*.lock"))
    for file in claims:
        what = unquote(file.stem)
        keeps = any(what == keeping(part, run) for part in parts)
        if keeps or any(part in parts and meant(what) for part, meant in wanted.items()):
            left += _holder(file, what, keeps=keeps)
    if "rollouts" in parts and config.rollout is not None:
        left += _holder(lock_of(config.rollout), f"running rollouts {config.rollout.name}", keeps=False)
    return left


def _holder(file: Path, what: str, *, keeps: bool) -> list[Left]:
    """Who holds a lock, if somebody does."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fields = os.pread(fd, 32, 0).split()
        pid = int(fields[0]) if fields and fields[0].isdigit() else 0
        return [Left(pid, what, start_of(pid), keeps)]
    except OSError:
        return []  # there are no locks here
    finally:
        os.close(fd)
    return []


def await_ends(
    config: WholeConfig, parts: Sequence[str], say: Callable[[str], None], *, take_over: bool
) -> None:
    """Return once nothing of an earlier start holds what these parts need.

    What a start left running, when it could not end it, ends by itself soon.

    Args:
        take_over: end whatever there is.

    Raises:
        LaneLockedError: something does.
    """
    begun = time.monotonic()
    patience = Patience(begun, after_s=SAID_S, again_s=SAY_AFTER_S)
    while left := left_of(config, parts):
        holders = [process for process in left if process.keeps] or left
        texts = "; ".join(str(process) for process in {process.pid: process for process in holders}.values())
        if take_over:
            say(f"taking over from {texts}: waiting at most {ASKED_S + INSIST_S:g} s for the end of that")
            _end(left)
            take_over = False
            continue
        ends = all(process.mark is not None and not process.keeps for process in left)
        if not ends or time.monotonic() - begun > ENDED_S:
            raise LaneLockedError(
                f"run {config.run} in {config.serve.store} is under way: {texts}. Stop that, or let this one "
                "end it and go on: --take-over"
            )
        if patience.due(now := time.monotonic()):
            left_s = ENDED_S - (now - begun)
            say(waits(f"what an earlier start left, and ends: {texts}", now - begun, left_s, time.time()))
        time.sleep(LOOK_S)


def _end(left: Sequence[Left]) -> None:
    """Ask these processes to end, or if some keep others running, those first; then end what is left of
    all."""
    holders = [process for process in left if process.keeps] or left
    for pid in {process.pid for process in holders if _command(process.pid)}:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    pids = {process.pid for process in left if _command(process.pid)}
    marks = {process.mark for process in left if process.mark is not None}

    def running() -> list[int]:
        ours = {pid for mark in marks for pid in marked(mark)}
        return sorted(ours | {pid for pid in pids if _runs(pid)})

    end_all(running, ASKED_S)


def _command(pid: int) -> str:
    """The command line of a process that is one of ours; empty: another one has its number, or none."""
    command = command_of(pid)
    return command if "rollbook" in command else ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z"
    except OSError:
        return False


CLOSED_S = guard.INSIST_S + 5.0


class Guard:
    """The process that ends what is left of this start once this process is gone; Linux only.

    Args:
        mark: of the start.
        say: told what somebody should know.
    """

    def __init__(self, mark: str, say: Callable[[str], None]) -> None:
        self.mark, self._say = mark, say
        self._child: asyncio.subprocess.Process | None = None
        self._pipe = -1
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it."""
        if sys.platform != "linux":
            return
        await self._begin()
        self._watching = asyncio.create_task(self._watch())

    async def _begin(self) -> None:
        """Start one; only this process holds the end of its pipe."""
        reading, self._pipe = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *(interpreter(), "-I", "-S", str(Path(guard.__file__).resolve())),
                *(f"{START}={self.mark}", str(guard.GRACE_S)),
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if key != START},
                cwd="/",
                start_new_session=True,  # a terminal that is closed, or its Ctrl-C, is not for it
            )
        finally:
            os.close(reading)

    async def _watch(self) -> None:
        """Start another one when it is ended by somebody."""
        while True:
            assert self._child is not None
            await self._child.wait()
            self._say("the guard of this run was ended: it is started again")
            os.close(self._pipe)
            await self._begin()
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Have it end what is left after all parts were stopped, and end."""
        if self._child is None or self._watching is None:
            return
        self._watching.cancel()
        with contextlib.suppress(OSError):
            os.write(self._pipe, guard.ENDED)
        os.close(self._pipe)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), CLOSED_S)


@contextlib.asynccontextmanager
async def guarded(mark: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Context: nothing of this start outlives it, however it ends."""
    watchdog = Guard(mark, say)
    await watchdog.start()
    try:
        yield
    finally:
        await watchdog.close()
