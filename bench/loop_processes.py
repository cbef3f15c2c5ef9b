"""Processes of the online loop, which are killed and restarted with the same command line.

Each is forked from one process that has imported everything and started nothing, so that a start
takes a fraction of a second; from there on it is the command itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from rollbook.bench.cluster_machines import Place
from rollbook.bench.processes import KEY_VARIABLES, BenchError
from rollbook.bench.tied import end_with_parent

READY_S, STOP_S = 60.0, 20.0
COMMAND, ENGINE = "rollbook.cli.app", "rollbook.bench.scripted.serve"
PRELOADED = [
    "rollbook.train.loop.loop",
    "rollbook.replay.step.step",
    "rollbook.ingest.serve.serve",
    ENGINE,
]
PAUSE_S = 0.2
"""Before a process that ended by itself is started again."""
_starting = threading.Lock()


def become(
    module: str, words: Sequence[str], log: Path, environment: Mapping[str, str], place: Place | None
) -> None:
    """Run as `python -m MODULE WORDS...`, with output appended to the log, at a place if there is one."""
    end_with_parent()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if place is not None:
        place.enter()
    for variable in KEY_VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(environment)
    sys.argv = [module, *words]
    sys.orig_argv = [sys.executable, "-m", module, *words]  # by which a proxy begins again
    try:
        import_module(module).main()
    except SystemExit as end:
        code = end.code
        _leave(code if isinstance(code, int) else int(code is not None))
    except BaseException:
        traceback.print_exc()
        _leave(70)
    _leave(0)


def _leave(code: int) -> None:
    """Exit as a program does, except for the exit handlers of the fork's parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Victim:
    """A process that is killed, or ends, and is started again."""

    def __init__(
        self,
        name: str,
        module: str,
        words: Sequence[object],
        log: Path,
        environment: Mapping[str, str] | None = None,
        preloaded: Sequence[str] = PRELOADED,
        place: Place | None = None,
    ) -> None:
        self.name, self.log, self._preloaded = name, log, preloaded
        self._target = (module, [str(word) for word in words], log, dict(environment or {}), place)
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._process: Any = None
        self.kills = self.ends = 0
        """How often it was killed, and ended by itself with an error."""

    def start(self) -> None:
        """Start it; it is not waited for."""
        with _starting:
            self._context.set_forkserver_preload([__name__, *self._preloaded])
            # No daemon in multiprocessing's sense: those may have no children, and a proxy has its sealer.
            self._process = self._context.Process(target=become, args=self._target)
            self._process.start()

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        pid: int = self._process.pid
        return pid

    @property
    def code(self) -> int | None:
        """How it ended, None while it lives."""
        code: int | None = None if self._process is None else self._process.exitcode
        return code

    def kill(self) -> None:
        """kill -9, and start it again at once."""
        self.kills += 1
        self._process.kill()
        self._process.join(STOP_S)
        self.start()

    def tend(self) -> None:
        """Start it again if it ended with an error, as a supervisor does."""
        if self.code not in (None, 0):
            self.ends += 1
            time.sleep(PAUSE_S)
            self.start()

    def stop(self) -> None:
        """End it, politely first; one that has already ended is left alone."""
        if not self.running:
            return
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.join(STOP_S)
        self.end()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it has not ended by then."""
        self._process.join(seconds)
        return self.code

    def end(self) -> None:
        """End it at once."""
        if self.running:
            self._process.kill()
            self._process.join(STOP_S)

    def await_http(self, url: str) -> None:
        """Wait until a GET there is answered with 200.

        Raises:
            BenchError: it ended, or took too long.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.code is not None:
                raise self.failed(f"ended with {self.code}")
            with contextlib.suppress(URLError, OSError), urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return
            time.sleep(0.02)
        raise self.failed(f"did not answer within {READY_S:.0f} s")

    def failed(self, how: str) -> BenchError:
        """The error for its failure, with the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-15:] if self.log.exists() else []
        return BenchError("\n".join([f"{self.name} {how}", *lines]))
