"""A part of a run: a process that is started, watched, started again when it dies, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rollbook.online.address import Proof
from rollbook.store.errors import RollbookError

MOST_STARTS, WITHIN_S = 6, 600.0
"""A part that was started so often within this time is not started again."""
LOOK_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
ANSWER_S = 10.0
"""So long an answer to one question whether it is well is waited for."""
LAST_LINES = 15
_SET_PARENT_DEATH_SIGNAL = 1
BAD_INPUT = 2
"""Exit code of our commands for what another start would not mend."""


class PartError(RollbookError):
    """A part of a run ended for good; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a part is.

    Attributes:
        log: file for what it prints.
        health: address that answers 200 once it is ready; None: it is ready at once.
        any_answer: whatever it answers, it is ready: it may wait for another part.
        proof: that it is this very part which answers there; None: whatever does is taken for it.
        ready_s: longest time until then. silence_s: after this long without an answer it is ended.
        stop_s: from SIGTERM to SIGKILL.
        ends: it ends by itself, with exit code 0; another one runs until it is stopped.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    any_answer: bool = False
    proof: Proof | None = None
    ready_s: float = 300.0
    silence_s: float = 120.0
    stop_s: float = 30.0
    ends: bool = False


class Part:
    """Runs one part.

    Args:
        say: told what became of it.
    """

    def __init__(self, spec: Spec, say: Callable[[str], None]) -> None:
        self.spec, self._say = spec, say
        self.state, self.since = "not started", time.time()
        """For people: not started, starting, running, starting again, stopping, ended; and since when, in
        seconds since 1970."""
        self.pid: int | None = None
        self.ready = asyncio.Event()
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._log_from = 0
        """Where in its log begins what it printed since it was started last."""

    async def run(self) -> None:
        """Run it until it ends by itself, or is stopped.

        Raises:
            PartError: it cannot be started, or died too often.
        """
        pause = PAUSE_S
        while not self._stopping:
            begun = time.monotonic()
            self._starts.append(begun)
            self._become("starting" if len(self._starts) == 1 else "starting again")
            code = await self._once()
            if self._stopping or (self.spec.ends and code == 0):
                break
            self._check(code)
            pause = PAUSE_S if time.monotonic() - begun > WITHIN_S else min(pause * 2, LONGEST_PAUSE_S)
            self._become("starting again")
            self._say(f"{self.spec.name} {_ended(code)}: it is started again; {self.spec.log} says more")
            await asyncio.sleep(pause / 2)
        self._become("ended")

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.time()

    async def _once(self) -> int:
        """Start it, and wait for its end; the exit code."""
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            self._log_from = log.tell()
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env=os.environ | spec.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a terminal's Ctrl-C is for us, who stop all in order
                    preexec_fn=_ends_with(os.getpid()),
                )
            except OSError as error:
                raise PartError(
                    f"{spec.name} cannot be started: {spec.command[0]}: {error.strerror}"
                ) from error
        self.pid = self._child.pid
        watching = asyncio.create_task(self._watch())
        try:
            return await self._child.wait()
        finally:
            watching.cancel()
            _end_group(self._child.pid, signal.SIGKILL)  # of what it started nothing is left behind

    async def _watch(self) -> None:
        """Note when it is ready, and end it when it falls silent."""
        assert self._child is not None
        if self.spec.health is None:
            self._answers()
            return
        heard, limit = time.monotonic(), self.spec.ready_s
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if await self._is_well(client, self.spec.health):
                        self._answers()
                        heard, limit = time.monotonic(), self.spec.silence_s
                if time.monotonic() - heard > limit:
                    self._say(f"{self.spec.name} does not answer {self.spec.health} for {limit:g} s: ended")
                    _end_group(self._child.pid, signal.SIGKILL)
                await asyncio.sleep(LOOK_S if self.ready.is_set() else LOOK_S / 8)

    async def _is_well(self, client: httpx.AsyncClient, health: str) -> bool:
        """Whether it answers as it should. Another one's server may be at its address."""
        proof = self.spec.proof
        question = {} if proof is None else proof.question()
        answer = await client.get(health, headers=question)
        if proof is not None and not proof.proven(question, answer):
            return False
        return self.spec.any_answer or answer.status_code == 200

    def _answers(self) -> None:
        if not self._stopping:
            self._become("running")
        self.ready.set()

    def _check(self, code: int) -> None:
        """See whether it may be started again.

        Raises:
            PartError: it may not.
        """
        spec, first = self.spec, len(self._starts) == 1
        often = len(self._starts) == MOST_STARTS and time.monotonic() - self._starts[0] < WITHIN_S
        if often:
            why = f"{_ended(code)}, for the {MOST_STARTS}th time within {WITHIN_S / 60:g} minutes"
        elif first and (not self.ready.is_set() or (code == BAD_INPUT and spec.health is None)):
            why = _ended(code) + ("" if spec.health is None else " before it was ready")
        else:
            return
        self._become("failed")
        raise PartError(f"{spec.name} {why}; {spec.log} ends with:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of what it printed since it was started last."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - (64 << 10), self._log_from))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
        return ""

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL to what is left after `stop_s`."""
        self._stopping = True
        child = self._child
        if child is None or child.returncode is not None:
            return
        self._become("stopping")
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), self.spec.stop_s)
        except TimeoutError:
            self._say(f"{self.spec.name} did not end within {self.spec.stop_s:g} s of SIGTERM: killed")
        _end_group(child.pid, signal.SIGKILL)
        await child.wait()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        if self._child is not None and self._child.returncode is None:
            _end_group(self._child.pid, signal.SIGKILL)


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _ends_with(parent: int) -> Callable[[], None]:
    """What a child does before it becomes its program: has the kernel end it when the thread that started it
    is gone, which is that of the event loop, orderly; Linux only."""

    def tie() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != parent:  # it ended before
                os._exit(128 + signal.SIGTERM)

    return tie


_LIBC = ctypes.CDLL(None)
