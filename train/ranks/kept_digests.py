"""Digests of a policy's weights and of its optimizer's state, kept for as long as these stay as they are.

What a step ends with the next one begins with: to read it twice would take as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rollbook.engines.weights.digests import Look, lines_of_stream
from rollbook.store.digest import combine

Digested = Literal["weights", "state"]


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of named tensors, and the line of each in it, in the order in which they came."""

    digest: str
    lines: tuple[str, ...]


def digest_of(lines: Sequence[str]) -> Digest:
    """The digest that lines come to."""
    return Digest(combine(lines), tuple(lines))


class KeptDigests:
    """Whoever changes what is digested says so."""

    def __init__(self) -> None:
        self._kept: dict[Digested, Digest] = {}

    def changed(self, *kinds: Digested) -> None:
        """These are others now."""
        for kind in kinds:
            self._kept.pop(kind, None)

    def of(
        self,
        kind: Digested,
        stream: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        look: Look | None = None,
    ) -> Digest:
        """The digest of what `stream` gives, which is only asked if there is none.

        Args:
            look: what is to look at every tensor; then the stream is asked in any case.
        """
        if look is not None or kind not in self._kept:
            self._kept[kind] = digest_of(lines_of_stream(stream(), look))
        return self._kept[kind]
