"""Shared-memory tensors that an engine's process on this host can map.

PyTorch's strategy `file_system` names the memory by a file. The default one passes file
descriptors, which a process that is no child of this one cannot take: SGLang 0.5.23 dies of it
on a CPU.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

_started = False


def shared_bytes(size: int) -> torch.Tensor:
    """Named memory, uint8 [size].

    It is named when it is created, because naming it later would move it while others read it.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    with _quiet_start():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


def payload(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Handles with which one process can map tensors in `shared_bytes`, once."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Start PyTorch's tracker process, which lives as long as an engine maps the files, without this
    process's stderr.

    With it, a reader of this process's stderr would wait until the tracker ends.
    """
    global _started
    if _started:
        yield
        return
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
        _started = True
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
