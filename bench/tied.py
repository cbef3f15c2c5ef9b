"""Children that end with their parent, on given cores: `python tied.py CORES WORDS...` becomes WORDS.

Imports nothing of Rollbook, so that any interpreter can run it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it. It outlives an `exec`. Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Take the cores (`0,1`, or `all`), then become the command."""
    end_with_parent()
    cores, words = sys.argv[1], sys.argv[2:]
    if cores != "all" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
