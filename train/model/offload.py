"""Keeps a policy's tensors elsewhere, so that its device's memory is free: a GPU's in the host's
memory, a CPU's in a file."""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch


class Offloaded:
    """Tensors whose memory is released until `bring_back`. They stay the same objects, and so do
    views of them.

    Args:
        kept: tensors whose values come back.
        emptied: tensors whose values are lost.
    """

    def __init__(self, kept: Iterable[torch.Tensor], emptied: Iterable[torch.Tensor]) -> None:
        self._file: Any = None
        empty = _storages(emptied)
        full = {address: storage for address, storage in _storages(kept).items() if address not in empty}
        self._sizes = [(storage, storage.nbytes()) for storage in [*full.values(), *empty.values()]]
        self._held = [(storage, self._saved(storage)) for storage in full.values()]
        for storage, _ in self._sizes:
            _give_away(storage)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Allocate the memory again, with the values that were kept."""
        for storage, size in self._sizes:
            if storage.device.type != "cpu":
                storage.resize_(size)
        if self._file is not None:
            self._file.seek(0)
        for storage, saved in self._held:
            if saved is not None:
                _bytes_of(storage).copy_(saved)
                continue
            left = _bytes_of(storage).numpy().data
            while left:  # a single read ends at 2 GiB
                left = left[self._file.readinto(left) :]
        if self._file is not None:
            self._file.close()

    def _saved(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """A GPU's values in the host's memory; None: they are in the file."""
        data = _bytes_of(storage)
        if storage.device.type != "cpu":
            return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data)
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        left = data.numpy().data
        while left:
            left = left[self._file.write(left) :]
        return None


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, each once, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_away(storage: torch.UntypedStorage) -> None:
    """Release a storage's memory to the device, or to the system: on Linux its pages, while it
    keeps its addresses, since numpy arrays may lie in them, too."""
    if storage.device.type != "cpu":
        storage.resize_(0)
    elif sys.platform == "linux":
        page = mmap.PAGESIZE
        start = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes()) // page * page - start
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
