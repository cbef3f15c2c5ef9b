"""The root-to-leaf paths of a forest of turns, and which path owns what several share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnedPath:
    """A root-to-leaf path through a forest of turns.

    Attributes:
        nodes: places of its turns, from the root to the leaf.
        owned: of each, whether this path owns it, so that its tokens count for this path.
    """

    nodes: tuple[int, ...]
    owned: tuple[bool, ...]


def owned_paths(parents: Sequence[int], before: int | None = None) -> Iterator[OwnedPath]:
    """Every root-to-leaf path, leaves in order: the first leaf owns what it shares with later ones.

    Args:
        parents: place of each turn's parent, -1 for a root.
        before: a leaf that owns all of its path, before the first one; None: there is none.
    """
    seen = [False] * len(parents)
    reserved = set() if before is None else set(path_to(before, parents))
    for leaf in leaves(parents):
        nodes = path_to(leaf, parents)
        yield OwnedPath(nodes, tuple(leaf == before or not (seen[n] or n in reserved) for n in nodes))
        for node in nodes:
            seen[node] = True


def leaves(parents: Sequence[int]) -> list[int]:
    """The turns that no turn extends, in order."""
    inner = set(parents)
    return [turn for turn in range(len(parents)) if turn not in inner]


def path_to(leaf: int, parents: Sequence[int]) -> tuple[int, ...]:
    """The turns from the root to a leaf."""
    nodes = [leaf]
    while (parent := parents[nodes[-1]]) >= 0:
        nodes.append(parent)
    return tuple(reversed(nodes))
