"""Digests of a policy's weights and of its optimizer's state, kept for as long as these stay as they are.

What a step ends with the next one begins with: to read it twice would take as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

from rollbook.ingest.engines.weights.digests import digest_stream

Kind = Literal["weights", "state"]
Stream = Iterator[tuple[str, torch.Tensor]]
Look = Callable[[str, torch.Tensor], None]
"""Called with the name of a tensor and the tensor; it may raise."""


class KeptDigests:
    """Whoever changes what is digested says so."""

    def __init__(self) -> None:
        self._kept: dict[Kind, str] = {}

    def changed(self, *kinds: Kind) -> None:
        """These are others now."""
        for kind in kinds:
            self._kept.pop(kind, None)

    def of(self, kind: Kind, stream: Callable[[], Stream], look: Look | None = None) -> str:
        """The digest of what `stream` gives, which is only asked if there is none.

        Args:
            look: what is to look at every tensor; then the stream is asked in any case.
        """
        if look is not None or kind not in self._kept:
            self._kept[kind] = digest_stream(looked_at(stream(), look))
        return self._kept[kind]


def looked_at(tensors: Stream, look: Look | None) -> Stream:
    """The tensors, each looked at before."""
    for name, tensor in tensors:
        if look is not None:
            look(name, tensor)
        yield name, tensor
