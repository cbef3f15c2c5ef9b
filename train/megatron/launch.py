"""Starts the other ranks of a training as processes of this host, and tells what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLLOW = ("-m", "rollbook.train.megatron.follow")
WORDS = 6
"""Lines of a rank's output that are told as its last words."""
DEATH_S = 5.0
"""Longest wait for a rank that is ending to have ended."""
DUMP_S = 1.0
"""Wait for a rank to say where it is, when it is asked to."""
WAITING = "torch/distributed/"
"""What is in the innermost calls of a rank that waits for another."""


class Launched:
    """Ranks 1 to `count` - 1 as processes of this host. Each leads a session of its own, so that Ctrl-C is
    for rank 0 alone, and ends when this process does.

    Args:
        address: host and port of the store at which all ranks meet.
    """

    def __init__(self, count: int, address: tuple[str, int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollbook-ranks-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, count):
            words = [str(word) for word in (*address, rank, count, os.getpid())]
            with self._file(rank).open("wb") as said:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, *FOLLOW, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )

    def _file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.txt"

    def ended(self) -> str | None:
        """How a rank ended, and its last words; None where none did. Of several, one that a signal ended: the
        others may have ended since it was gone."""
        codes = {rank: code for rank, p in self._processes.items() if (code := p.poll()) is not None}
        if not codes:
            return None
        rank = min(codes, key=lambda rank: codes[rank])
        return f"rank {rank} {_ending(codes[rank])}; its last words:\n{self._words(rank)}"

    def last_words(self, wait_s: float = DEATH_S) -> str | None:
        """What became of a rank that ended or hangs, and its last words; None where all are well."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if ended := self.ended():
                return ended
            time.sleep(0.05)
        return self._hanging()

    def _hanging(self) -> str | None:
        """The first rank that is somewhere else than waiting for another one, and where."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(DUMP_S)
        for rank in self._processes:
            said = self._file(rank).read_text(errors="replace")
            innermost = said.rpartition("most recent call first")[2].splitlines()[1:6]
            if not innermost:
                return f"rank {rank} does not answer, and did not say where it is"
            if not any(WAITING in line for line in innermost):
                return f"rank {rank} hangs; it is in:\n" + "\n".join(innermost)
        return None

    def _words(self, rank: int) -> str:
        lines = [line for line in self._file(rank).read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-WORDS:]) or "  (none)"

    def close(self) -> None:
        """End them all, those that do not end by themselves by force."""
        until = time.monotonic() + DEATH_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes.clear()
        self._folder.cleanup()


def _ending(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (as the kernel does where memory is out)" if name == "SIGKILL" else "")
