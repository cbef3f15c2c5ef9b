"""A following rank: `python -m rollbook.train.ranks.follow HOST PORT RANK COUNT LEADER`.

It does its part of what rank 0 asks all ranks to do, and ends when rank 0 does. A `Follower`
starts it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(leader: int) -> None:
    """Have the kernel end this process when its parent ends, in whatever way (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:  # it ended before
        sys.exit(1)


def main(host: str, port: int, rank: int, count: int, leader: int) -> None:
    """Follow until rank 0 lets go."""
    end_with(leader)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    gc.disable()  # `follow` has it again: until then modules load, and to go through them takes a tenth of it
    from rollbook.train.interface import choose_interface
    from rollbook.train.ranks.meeting import MeetingPoint, meet, take_secret
    from rollbook.train.ranks.ranks import follow

    choose_interface(host)
    follow(meet(MeetingPoint(host, port, take_secret()), leads=False), rank, count)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
