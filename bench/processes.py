"""Processes of a benchmark: started on given cores, measured, and ended with the process that
started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

import orjson

import rollbook
from rollbook.bench import tied
from rollbook.store.errors import RollbookError

READY_S, STOP_S = 90.0, 10.0
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class BenchError(RollbookError):
    """A process of a benchmark failed; the message ends with its last lines."""


KEY_VARIABLES = ("ROLLBOOK_API_KEYS", "ROLLBOOK_ENGINE_KEY", "ROLLBOOK_ENGINE_ADMIN_KEY")


def some_cores(count: int) -> str:
    """Which cores to share, as `0,1`: the first of those allowed; `all` where nothing can be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return "all"
    allowed = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, allowed[:count]))


def module(name: str, *words: object) -> list[str]:
    """`python -m NAME WORDS...`, with this interpreter."""
    return [sys.executable, "-m", name, *map(str, words)]


class Process:
    """A child that ends with its parent. It logs to a file, including its stdout if it takes no
    commands."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        cores: str,
        environment: Mapping[str, str] | None = None,
        *,
        talks: bool = True,
    ) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        tie = [sys.executable, str(Path(tied.__file__)), cores]
        path = {"PYTHONPATH": str(Path(rollbook.__file__).parents[1])}
        # Its servers are its own: keys that stand in the environment are for others.
        inherited = {k: v for k, v in os.environ.items() if k not in KEY_VARIABLES}
        with self._log.open("wb") as log:
            self.child = subprocess.Popen(
                [*tie, *command],
                env=inherited | path | dict(environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
            )

    def line(self) -> bytes:
        """Its next line on stdout.

        Raises:
            BenchError: it ended instead.
        """
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            self.child.wait(STOP_S)
            raise self.failed("ended")
        return line.strip()

    def url(self) -> str:
        """Its address, which is the first line it prints."""
        return self.line().decode()

    def ask(self, **command: Any) -> Any:
        """Send it a command; its answer.

        Raises:
            BenchError: it ended, or reports an error.
        """
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        """Send it a command, and go on; `answer` waits for what it says."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self.child.stdin.write(orjson.dumps(command) + b"\n")
            self.child.stdin.flush()

    def answer(self) -> Any:
        """Its answer to the command that was sent last.

        Raises:
            BenchError: it ended, or reports an error.
        """
        answer = orjson.loads(self.line())
        if isinstance(answer, dict) and "error" in answer:
            raise self.failed(answer["error"])
        return answer

    def await_http(self, url: str, seconds: float = READY_S) -> None:
        """Wait until a GET there is answered with 200.

        Raises:
            BenchError: it ended, or took too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise self.failed(f"ended with {self.child.returncode}")
            try:
                with urlopen(url, timeout=2) as response:
                    if response.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.1)
        raise self.failed(f"did not answer within {seconds:.0f} s")

    def failed(self, how: str) -> BenchError:
        """The error for its failure."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return BenchError("\n".join([f"{self.name} {how}", *lines]))

    def cpu_s(self) -> float:
        """CPU seconds of it and of its living children so far."""
        return sum(_cpu_s(pid) for pid in _tree(self.child.pid))

    def cpu_by_process(self) -> dict[int, float]:
        """CPU seconds so far of it and of each of its living children, by process id."""
        return {pid: _cpu_s(pid) for pid in _tree(self.child.pid)}

    def peak_rss(self) -> int:
        """The most bytes of memory it had resident so far, without its children."""
        return _status(self.child.pid, "VmHWM")

    def stop(self) -> None:
        """End it, politely first, and then its children; returns when none of them writes any more."""
        below = _tree(self.child.pid)[1:]
        self.child.terminate()
        try:
            self.child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            below = _tree(self.child.pid)[1:]
            self.child.kill()
            self.child.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_S
        while any(map(_lives, below)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _tree(pid: int) -> list[int]:
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in _tree(child))]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _status(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def obey(do: Callable[[dict[str, Any]], Any]) -> None:
    """The loop of a process that takes commands: answers each line of stdin with one on stdout,
    until stdin ends."""
    for line in sys.stdin.buffer:
        try:
            answer = do(orjson.loads(line))
        except Exception as error:  # told to who asked, who knows what it means
            answer = {"error": repr(error)}
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()
