"""Ends what is left of a run whose process is gone. A program:
`python -I -S guard.py MARK GRACE_S`.

Whatever a start of a run has started has the start's mark, NAME=VALUE, in its environment. This
process has not. Its stdin is a pipe whose other end the run's process alone holds, so it sees that
process end, also by SIGKILL. What the kernel has asked to end by then has some seconds for it.
Linux only; imports little, to start fast.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

GRACE_S = 10.0
"""So long what a run left may take to end by itself."""
INSIST_S = 5.0
"""So long what was sent SIGKILL is waited for: at a hung disk it may not end."""
LOOK_S = 0.2
ENDED = b"."
"""What a run says that has stopped all its parts: nothing is to be waited for."""


def marked(mark: str) -> list[int]:
    """Processes of this user that a start of a run has started, and that still run."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark.encode() in file.read().split(b"\0"):
                        pids.append(int(name))
            except OSError:
                continue  # it ended meanwhile, or is another user's
    return pids


def end_all(running: Callable[[], list[int]], grace_s: float) -> None:
    """Wait for processes to end, and end those that take longer."""
    until = time.monotonic() + grace_s
    while running() and time.monotonic() < until:
        time.sleep(LOOK_S)
    until = time.monotonic() + INSIST_S
    while (pids := running()) and time.monotonic() < until:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(LOOK_S / 4)


def main() -> None:
    """Wait for the end of the run's process, and then for that of its parts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    received = b""
    while data := os.read(0, 64):
        received += data
    end_all(lambda: marked(sys.argv[1]), 0.0 if received else float(sys.argv[2]))


if __name__ == "__main__":
    main()
