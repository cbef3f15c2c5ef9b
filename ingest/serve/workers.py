"""`rollbook serve --workers N`: a parent that forks N processes behind one port, and again when one dies.

The parent has loaded everything by then, and begins no thread, so that a fork is ready in a moment. It reads
no log, answers no request, and holds the claim to record the run, which its workers inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Never

from rollbook.store.errors import EngineError, RollbookError

QUICK_S = 5.0
"""A worker that dies so soon after it began died at once."""
PAUSE_S = 0.2
"""Pause before a worker that died at once is started again; each time it does, twice as long."""
MOST_QUICK = 6
"""So often one after the other a worker may die at once; then the proxy ends."""
READY_S = 300.0
_SET_PARENT_DEATH_SIGNAL = 1

logger = logging.getLogger(__name__)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a child process, which ends with it.

    Raises:
        RollbookError: what it raised.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _be_child(lambda: _tell(writing, work))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise EngineError(
            f"the proxy cannot begin: a process ended with status {status}; see what it printed"
        )
    outcome = pickle.loads(data)  # our own child's
    if isinstance(outcome, RollbookError):
        raise outcome
    return outcome


def _tell(pipe: int, work: Callable[[], Any]) -> None:
    try:
        outcome = work()
    except RollbookError as error:
        outcome = error
    with os.fdopen(pipe, "wb") as file:
        file.write(pickle.dumps(outcome))


def _be_child(work: Callable[[], None]) -> Never:
    """Do the work in a process that was just forked, and end it."""
    parent, code = os.getppid(), 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            work()
            code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except RollbookError as error:
        logger.error("%s", error)
    except BaseException:
        logger.exception("rollbook: a worker failed")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker that runs, or is to be started.

    Attributes:
        pidfd: readable once it has ended.
        quick: how often it died at once, one after the other.
        due: when it is to be started, while it is not running.
    """

    number: int
    pid: int = 0
    pidfd: int = -1
    since: float = 0.0
    quick: int = 0
    due: float | None = None


@dataclass(slots=True, eq=False)
class Workers:
    """Keeps the workers running until a signal asks to end.

    Attributes:
        work: what a worker of a number does, given a callback for when it is ready; in the child.
    """

    count: int
    work: Callable[[int, Callable[[], None]], None]
    _workers: list[_Worker] = field(init=False)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _asked: list[int] = field(default_factory=list)
    """The signals that ask to end."""

    def __post_init__(self) -> None:
        self._workers = [_Worker(number) for number in range(self.count)]

    def run(self) -> None:
        """Start them, the first one before the others, and return once all have ended.

        Raises:
            EngineError: one does not stay.
        """
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        woken = signal.set_wakeup_fd(writing)
        for number in handlers:
            signal.signal(number, self._on_signal)
        self._selector.register(reading, selectors.EVENT_READ)
        try:
            self._start_all()
            while not self._asked:
                self._step()
        finally:
            self._end()
            signal.set_wakeup_fd(woken)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for fd in (reading, writing):
                os.close(fd)
            self._selector.close()
        signal.raise_signal(self._asked[0])  # what is around this ends as it would have

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked.append(number)
        if len(self._asked) > 1:  # at once, please
            for worker in self._workers:
                self._send(worker, signal.SIGKILL)

    def _start_all(self) -> None:
        first, *others = self._workers
        self._await_ready(first, self._start(first))  # it identifies the engines' weights for all
        begun = [(worker, self._start(worker)) for worker in others if not self._asked]
        for worker, ready in begun:
            self._await_ready(worker, ready)

    def _await_ready(self, worker: _Worker, ready: int) -> None:
        """Wait until a worker is ready, or has ended."""
        with os.fdopen(ready, "rb") as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            until = time.monotonic() + READY_S
            while not self._asked and not selector.select(0.2) and time.monotonic() < until:
                pass
            if not self._asked and not pipe.read(1):
                raise EngineError(f"worker {worker.number} of the proxy did not begin; see what it printed")

    def _start(self, worker: _Worker) -> int:
        """Fork it; the descriptor that becomes readable once it is ready, or has ended."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if not pid:
            os.close(reading)
            _be_child(lambda: self.work(worker.number, lambda: _say_ready(writing)))
        os.close(writing)
        worker.pid, worker.pidfd = pid, os.pidfd_open(pid)
        worker.since, worker.due = time.monotonic(), None
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        return reading

    def _step(self) -> None:
        """Wait for something to happen, and start again what has died."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.due is not None and worker.due <= now:
                os.close(self._start(worker))
        due = [worker.due for worker in self._workers if worker.due is not None]
        patience = max(min(due) - time.monotonic(), 0.0) if due else None
        for key, _ in self._selector.select(patience):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 64)
            else:
                self._died(key.data)

    def _died(self, worker: _Worker) -> None:
        status = self._reap(worker)
        if self._asked:
            return
        quick = time.monotonic() - worker.since < QUICK_S
        worker.quick = worker.quick + 1 if quick else 0
        why = f"signal {-status}" if status < 0 else f"exit code {status}"
        if worker.quick >= MOST_QUICK:
            raise EngineError(
                f"worker {worker.number} of the proxy ended {MOST_QUICK} times at once ({why}): see what it "
                "printed, and start the proxy with --workers 1"
            )
        pause = PAUSE_S * 2 ** (worker.quick - 2) if worker.quick > 1 else 0.0
        worker.due = time.monotonic() + pause
        logger.warning("worker %s of the proxy ended (%s) and is started again", worker.number, why)

    def _reap(self, worker: _Worker) -> int:
        _, status = os.waitpid(worker.pid, 0)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        worker.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _send(self, worker: _Worker, number: int) -> None:
        if worker.pid:
            signal.pidfd_send_signal(worker.pidfd, number)

    def _end(self) -> None:
        """Have all end orderly; the first one is asked last, as the others speak with it."""
        for worker in reversed(self._workers):
            with contextlib.suppress(ProcessLookupError):
                self._send(worker, signal.SIGTERM)
        for worker in self._workers:
            if worker.pid:
                self._reap(worker)


def _say_ready(pipe: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for one that is started again
        os.write(pipe, b"1")
    os.close(pipe)
