"""Digests of a policy's weights and of its optimizer's state, cached for as long as these do not
change.

A step begins with what the step before ended with: reading it twice would take as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollbook.engines.weights.digests import Look, lines_of_stream
from rollbook.store.digest import combine, is_tree

Digested = Literal["weights", "state"]


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of named tensors, and each tensor's line in it, in the order in which they came."""

    digest: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trees:
    """Which digests of a step are by blocks, as earlier releases had none.

    Attributes:
        weights: those of weights, the critic's too.
        state: those of gradients and of the optimizer's state.
    """

    weights: bool = True
    state: bool = True


ALL_TREES = Trees()


def trees_of(input_digests: Mapping[str, Any]) -> Trees:
    """Which digests of a step are by blocks, by those that its manifest has of what it starts from."""
    weights, state = (str(input_digests.get(f"input_{what}")) for what in ("weights", "optimizer"))
    return Trees(is_tree(weights), is_tree(state))


def digest_of(lines: Sequence[str], *, tree: bool = False) -> Digest:
    """The digest of a set of lines."""
    return Digest(combine(lines, tree=tree), tuple(lines))


class KeptDigests:
    """A cache of digests. Whoever changes the tensors behind a digest calls `changed`."""

    def __init__(self) -> None:
        self._kept: dict[Digested, Digest] = {}

    def changed(self, *kinds: Digested) -> None:
        """The tensors behind these digests have changed."""
        for kind in kinds:
            self._kept.pop(kind, None)

    def of(
        self,
        kind: Digested,
        stream: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        look: Look | None = None,
        *,
        tree: bool = False,
    ) -> Digest:
        """The digest of the tensors that `stream` gives, which is called only if the digest is not
        cached.

        Args:
            look: called with every tensor; with it, the stream is read in any case.
            tree: whether it is to be a tree's.
        """
        kept = self._kept.get(kind)
        if look is not None or kept is None or is_tree(kept.digest) != tree:
            kept = self._kept[kind] = digest_of(lines_of_stream(stream(), look, tree=tree), tree=tree)
        return kept
