"""Starts the other ranks of a training as processes, and reports what became of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from rollbook.train.interface import LOOPBACK, stay_on_this_host
from rollbook.train.ranks.meeting import SECRET, Meeting, MeetingPoint, meet, new_secret

FOLLOW = ("-m", "rollbook.train.ranks.follow")
WORDS = 6
"""Lines of a rank's output that are told as its last words."""
_LEAKS = re.compile(r"\s*(nanobind: | - leaked | - \.\.\. skipped|See https://nanobind\.)")
"""What Triton's binding says of itself as any process ends, behind what that died of."""
DEATH_S = 5.0
"""Longest wait for a rank that is ending to have ended."""
DUMP_S = 1.0
"""Wait for a rank to say where it is, when it is asked to."""
WAITING = "torch/distributed/"
"""What is in the innermost calls of a rank that waits for another."""


class Follower:
    """A rank as a process of this host. It leads a session of its own, so that Ctrl-C reaches rank
    0 alone, and ends when the process that started it does.

    Args:
        point: where all ranks meet; the process gets the secret by its environment, which nobody
            else reads.
        environment: of the process, all the rest of it; None: that of this one.
        program: the interpreter's arguments that come first; None: those of a rank.
    """

    def __init__(
        self,
        point: MeetingPoint,
        rank: int,
        count: int,
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] | None = None,
    ) -> None:
        words = [str(word) for word in (point.host, point.port, rank, count, os.getpid())]
        self._log_file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, *(program or FOLLOW), *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=self._log_file,
            start_new_session=True,
            env={**(os.environ if environment is None else environment), SECRET: point.secret},
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def ended(self) -> tuple[int, str] | None:
        """Its exit code, or the negative number of the signal that ended it, and how it ended, with
        its last output; None while it runs."""
        code = self._process.poll()
        return None if code is None else (code, f"{_ending(code)}; its last words:\n{self._words()}")

    def dump(self) -> None:
        """Have it print where it is."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def where(self) -> list[str]:
        """The innermost calls that it printed; none if it printed none."""
        return self._output().rpartition("most recent call first")[2].splitlines()[1:6]

    def close(self, wait_s: float) -> None:
        """End it, by force if it does not end by itself in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log_file.close()

    def _output(self) -> str:
        # The process writes at the place in the file that a read of this one's would move.
        descriptor = self._log_file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def _words(self) -> str:
        lines = [line for line in self._output().splitlines() if line.strip() and not _LEAKS.match(line)]
        return "\n".join(f"  {line}" for line in lines[-WORDS:]) or "  (none)"


class FollowerRanks(ABC):
    """Ranks 1 to `count` - 1, on whatever hosts."""

    def __init__(self, count: int) -> None:
        self._ranks = range(1, count)

    @abstractmethod
    def _ask(self, method: str) -> dict[int, Any]:
        """The result of a `Follower`'s method, by rank; ranks that do not answer are left out."""

    @abstractmethod
    def close(self) -> None:
        """End all of them, by force those that do not end by themselves."""

    def ended(self) -> str | None:
        """How a rank ended, and its last output; None where none did. If several ended, one that a
        signal ended: the others may have ended because it was gone."""
        endings = {rank: how for rank, how in self._ask("ended").items() if how is not None}
        if not endings:
            return None
        rank = min(endings, key=lambda rank: int(endings[rank][0]))
        return f"rank {rank} {endings[rank][1]}"

    def last_words(self, wait_s: float = DEATH_S) -> str | None:
        """What became of a rank that ended or hangs, and its last output; None where all are well."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if ended := self.ended():
                return ended
            time.sleep(0.05)
        return self._hanging()

    def _hanging(self) -> str | None:
        """The first rank that is not waiting for another one, and where it is."""
        self._ask("dump")
        time.sleep(DUMP_S)
        places = self._ask("where")
        for rank in self._ranks:
            innermost = places.get(rank)
            if not innermost:
                return f"rank {rank} does not answer, and did not say where it is"
            if not any(WAITING in line for line in innermost):
                return f"rank {rank} hangs; it is in:\n" + "\n".join(innermost)
        return None


class Launched(FollowerRanks):
    """Ranks as processes of this host.

    Args:
        point: where all ranks meet.
    """

    def __init__(self, count: int, point: MeetingPoint) -> None:
        super().__init__(count)
        self._followers = {rank: Follower(point, rank, count) for rank in self._ranks}

    def _ask(self, method: str) -> dict[int, Any]:
        return {rank: getattr(follower, method)() for rank, follower in self._followers.items()}

    def close(self) -> None:
        """End all of them, by force those that do not end by themselves."""
        until = time.monotonic() + DEATH_S
        for follower in self._followers.values():
            follower.close(max(until - time.monotonic(), 0))
        self._followers.clear()


Launch = Callable[[int], tuple[Meeting, FollowerRanks | None]]
"""Starts the others of so many ranks: where all meet, and the others; None where a launcher started them."""


def launch_here(count: int) -> tuple[Meeting, FollowerRanks]:
    """Start the other ranks on this host."""
    stay_on_this_host()
    meeting = meet(MeetingPoint(LOOPBACK, 0, new_secret()), leads=True)
    return meeting, Launched(count, meeting.point)


def _ending(code: int) -> str:
    """How a process ended, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (as the kernel does where memory is out)" if name == "SIGKILL" else "")
