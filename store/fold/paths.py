"""The root-to-leaf paths of a forest of turns, and which path owns what several share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnedPath:
    """A root-to-leaf path through a forest of turns.

    Attributes:
        nodes: places of its turns, from the root to the leaf.
        owned: of each, whether this is the first path it is on, whose tokens it therefore counts for.
    """

    nodes: tuple[int, ...]
    owned: tuple[bool, ...]


def owned_paths(parents: Sequence[int]) -> Iterator[OwnedPath]:
    """Every root-to-leaf path, leaves in order: the first leaf owns what it shares with later ones.

    Args:
        parents: place of each turn's parent, -1 for a root.
    """
    inner, seen = set(parents), [False] * len(parents)
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        nodes = [leaf]
        while (parent := parents[nodes[-1]]) >= 0:
            nodes.append(parent)
        nodes.reverse()
        yield OwnedPath(tuple(nodes), tuple(not seen[node] for node in nodes))
        for node in nodes:
            seen[node] = True
