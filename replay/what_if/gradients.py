"""How alike two gradients are, tensor by tensor: the first is kept in files, so that neither is in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two tensors are, or two sets of them.

    Attributes:
        cosine: of the angle between them; None where one of them is zero.
        norms: of the first, and of the second.
    """

    name: str
    cosine: float | None
    norms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class GradientSides:
    """How alike two gradients are.

    Attributes:
        whole: all tensors taken as one vector.
        tensors: each, the least similar first; those of which one side is zero come last.
    """

    whole: Likeness
    tensors: Sequence[Likeness]


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums over pairs of numbers, in float64: of products, and of squares of the first and of the second."""

    products: float = 0.0
    firsts: float = 0.0
    seconds: float = 0.0

    def likeness(self, name: str) -> Likeness:
        norms = sqrt(self.firsts), sqrt(self.seconds)
        if not all(norms):
            return Likeness(name, None, norms)
        # Of equal vectors this is exactly 1: the three sums are the same number.
        cosine = self.products / sqrt(self.firsts) / sqrt(self.seconds)
        if self.firsts == self.seconds == abs(self.products):
            cosine = 1.0 if self.products > 0 else -1.0
        return Likeness(name, max(-1.0, min(1.0, cosine)), norms)


@dataclass(slots=True, eq=False)
class KeptGradient(AbstractContextManager["KeptGradient"]):
    """A gradient that is kept to be compared with another one; a context, at whose end it is deleted."""

    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="rollbook-gradient-")
    )
    _files: dict[str, Path] = field(default_factory=dict)
    _sums: dict[str, _Sums] = field(default_factory=dict)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the first gradient."""
        self._files[name] = Path(self._folder.name) / f"{len(self._files)}.npy"
        np.save(self._files[name], _flat(tensor))

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the second one, which has the same names."""
        second = _flat(tensor).astype(np.float64)
        first = np.load(self._files[name]).astype(np.float64)
        self._sums[name] = _Sums(float(first @ second), float(first @ first), float(second @ second))

    def compared(self) -> GradientSides:
        """How alike the two are, once all tensors of both were taken."""
        each = [sums.likeness(name) for name, sums in self._sums.items()]
        whole = _Sums(
            sum(sums.products for sums in self._sums.values()),
            sum(sums.firsts for sums in self._sums.values()),
            sum(sums.seconds for sums in self._sums.values()),
        )
        ordered = sorted(each, key=lambda tensor: 2.0 if tensor.cosine is None else tensor.cosine)
        return GradientSides(whole.likeness("all"), ordered)


def _flat(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return tensor.detach().float().cpu().reshape(-1).numpy()
