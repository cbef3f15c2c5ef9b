"""Arranges turns as a tree for drawing. Pure.

A conversation that never forks is one list, however long: a turn that is its parent's only continuation
follows it on the same level. Only where a conversation goes on in several ways is each of them set in, and
past some depth not even then (each turn says what it extends).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollbook.cli.show.facts import COMPLETED, TurnFacts

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A turn, and what is drawn beneath it."""

    turn: TurnFacts
    beneath: list[Node] = field(default_factory=list)


_Start = tuple[TurnFacts, list[Node], list[Node] | None, int]
"""A turn with which a line begins, where it goes, where its line goes (None: beneath it), and the depth."""


def arrange(turns: Sequence[TurnFacts]) -> list[Node]:
    """The roots, with all other turns beneath them; every turn once, and siblings as they were asked."""
    there = {turn.turn_id for turn in turns}
    children: dict[str | None, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        children[turn.parent if turn.parent in there else None].append(turn)
    roots: list[Node] = []
    waiting: list[_Start] = [(turn, roots, None, 1) for turn in reversed(children[None])]
    while waiting:
        turn, place, line, depth = waiting.pop()
        node = Node(turn)
        place.append(node)
        line = node.beneath if line is None else line
        waiting += reversed(_follow(node, line, children, depth))
    return roots


def _follow(
    head: Node, line: list[Node], children: dict[str | None, list[TurnFacts]], depth: int
) -> list[_Start]:
    """Append a chain of only children; returns the turns at its fork."""
    node = head
    while True:
        after = children.get(node.turn.turn_id, [])
        # One that failed ends there: asked again, the conversation goes on as if it had not forked.
        ways = [turn for turn in after if turn.status == COMPLETED or turn.turn_id in children]
        if len(ways) > 1:
            if depth >= MAX_DEPTH:
                return [(turn, line, line, depth) for turn in after]
            return [(turn, node.beneath, None, depth + 1) for turn in after]
        for turn in after:
            line.append(Node(turn))
            if ways and turn is ways[0]:
                following = line[-1]
        if not ways:
            return []
        node = following
