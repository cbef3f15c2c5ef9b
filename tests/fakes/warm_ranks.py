"""Ranks as forks of a process that has imported what they need: a start takes six CPU seconds less.

From there on each is what `python -m rollbook.train.megatron.follow` is. How ranks begin, and end when others
do, is tested with real starts (`tests/train/test_rank_processes.py` and `test_placed_ranks.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollbook.bench.loop_processes import become
from rollbook.train.megatron import follow, launch

PRELOADED = (
    *("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel"),
    *("rollbook.train.megatron.layer", "rollbook.train.megatron.ranks"),
)
CONTEXT = multiprocessing.get_context("forkserver")


def main() -> None:
    """Be the rank that the words of this process start."""
    os.setsid()
    sys.path.insert(0, os.getcwd())  # as `-m` does
    follow.end_with = lambda leader: None  # `become` ends it with the process that it is a fork of
    follow.main(sys.argv[1], *(int(word) for word in sys.argv[2:]))


class WarmRank:
    """What a `Follower` needs of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, stdout: Any, env: Mapping[str, str] | None, **_: Any
    ) -> None:
        assert tuple(command[1:3]) == launch.FOLLOW, f"{command}: not a rank"
        output = f"/proc/{os.getpid()}/fd/{stdout.fileno()}"
        CONTEXT.set_forkserver_preload([__name__, *PRELOADED])
        given = (__name__, list(command[3:]), Path(output), dict(os.environ if env is None else env))
        self._process = CONTEXT.Process(target=become, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """How it ended; None: it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, when it has."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return code

    def kill(self) -> None:
        """At once."""
        self._process.kill()

    def send_signal(self, number: int) -> None:
        """One that it may handle."""
        os.kill(self.pid, number)


@contextlib.contextmanager
def warm_ranks() -> Iterator[None]:
    """Context: ranks that are started are forks."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", SimpleNamespace(Popen=WarmRank, **names))
        yield
