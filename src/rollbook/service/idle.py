"""Models that nobody works on: their states leave the device for this host's memory, and that for its disk.

What is on the disk is no truth: a state that is not there, or not whole, is made again from the log.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from pathlib import Path

from safetensors.torch import load_file, save_file

from rollbook.store.events import Json
from rollbook.store.permissions import make_folder
from rollbook.train.tenants.model import State


class IdleStates:
    """The states of idle models.

    Args:
        folder: for those on the disk; what an earlier process left there is removed.
        most: in memory at once.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._held = OrderedDict[str, State]()
        self._written: dict[str, Json] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, run: str, state: State) -> None:
        """Keep the state of a run's model; the oldest, and those of whole models, go to the disk."""
        if state.whole:
            self._write(run, state)
            return
        self._held[run] = state.on_host()
        while len(self._held) > self._most:
            self._write(*self._held.popitem(last=False))

    def take(self, run: str) -> State | None:
        """The state of a run's model, kept no more; None where it is not here, or another than was put."""
        if (held := self._held.pop(run, None)) is not None:
            return held
        if (digests := self._written.pop(run, None)) is None:
            return None
        state = None
        with contextlib.suppress(Exception):  # whatever is wrong with it: it is made again
            state = State({part: load_file(self._file(run, part)) for part in digests})
        shutil.rmtree(self._folder / run, ignore_errors=True)
        return state if state is not None and state.digests() == digests else None

    def _write(self, run: str, state: State) -> None:
        self._written[run] = state.digests()
        make_folder(self._folder / run)
        for part, tensors in state.parts.items():
            save_file({name: t.contiguous() for name, t in tensors.items()}, self._file(run, part))

    def _file(self, run: str, part: str) -> Path:
        return self._folder / run / f"{part}.safetensors"
