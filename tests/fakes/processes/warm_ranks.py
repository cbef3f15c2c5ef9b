"""Ranks, and references apart, as forks of a process that has imported what they need.

From there on each is what `python -m rollbook.train.ranks.follow` is. How ranks begin, and end when others
do, is tested with real starts (`test_rank_processes.py` and `test_placed_ranks.py` of `tests/train/ranks`).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.processes.warm import TORCH, WarmProcess

from rollbook.train.ranks import launch
from rollbook.train.step import reference

# A fork of another process than its leader is ended when that is gone, by who forked it.
RANK = """
import os, sys
from importlib import import_module
sys.path.insert(0, os.getcwd())
module = import_module(sys.argv[1])
module.end_with = lambda leader: None
module.main(sys.argv[2], *(int(word) for word in sys.argv[3:]))
"""


def start(command: Sequence[str], **options: Any) -> WarmProcess:
    """What starts the process of a rank, or of a reference."""
    assert tuple(command[1:3]) in (launch.FOLLOW, reference.PROGRAM), f"{command}: not a rank"
    return WarmProcess([sys.executable, "-c", RANK, *command[2:]], modules=TORCH, **options)


@contextlib.contextmanager
def warm_ranks() -> Iterator[None]:
    """Context: ranks that are started are forks."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", SimpleNamespace(Popen=start, **names))
        yield
