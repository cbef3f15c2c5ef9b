"""Packs weights into buckets: many tensors in one buffer, so that one call sends them.

Two buffers are enough: one is filled while an engine takes what is in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rollbook.store.events import Json
from rollbook.train.sync.shared_memory import shared_bytes

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors of one type side by side in `flat`, uint8 [bytes]."""

    flat: torch.Tensor
    names: tuple[str, ...]
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]

    def tensors(self) -> list[NamedTensor]:
        """The tensors, as views of `flat`."""
        views: list[NamedTensor] = []
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = torch.Size(shape).numel() * self.dtype.itemsize
            views.append((name, self.flat[start : start + size].view(self.dtype).view(shape)))
            start += size
        return views

    def described(self) -> Json:
        """Names, types and shapes, as `/update_weights_from_distributed` takes them."""
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = [list(shape) for shape in self.shapes]
        return {"names": list(self.names), "dtypes": [dtype] * len(self.names), "shapes": shapes}


class Buffers:
    """Two buffers, used alternately.

    Args:
        size: bytes of each; a tensor that is larger gets a buffer of its own.
        device: where they are.
        shared: whether other processes of this host map them.
    """

    def __init__(self, size: int, device: torch.device, *, shared: bool = False) -> None:
        self.size, self._device, self._shared = size, device, shared
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._turn = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes. It overwrites the contents of the buffer before the last."""
        self._turn = 1 - self._turn
        held = self._buffers[self._turn]
        if held is None or held.numel() < size:
            held = (
                shared_bytes(size)
                if self._shared
                else torch.empty(size, dtype=torch.uint8, device=self._device)
            )
            self._buffers[self._turn] = held
        return held


def buckets(tensors: Iterable[NamedTensor], buffers: Buffers) -> Iterator[Bucket]:
    """Pack tensors, in order. A bucket ends where it is full, and where another type begins.

    A bucket's buffer is filled again when the bucket after the next is asked for.
    """
    waiting: list[NamedTensor] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and (filled + size > buffers.size or tensor.dtype != waiting[0][1].dtype):
            yield _packed(waiting, filled, buffers)
            waiting, filled = [], 0
        waiting.append((name, tensor))
        filled += size
    if waiting:
        yield _packed(waiting, filled, buffers)


def _packed(tensors: list[NamedTensor], size: int, buffers: Buffers) -> Bucket:
    names = tuple(name for name, _ in tensors)
    shapes = tuple(tuple(tensor.shape) for _, tensor in tensors)
    bucket = Bucket(buffers.take(size)[:size], names, tensors[0][1].dtype, shapes)
    for (_, view), (_, tensor) in zip(bucket.tensors(), tensors, strict=True):
        view.copy_(tensor)
    return bucket
