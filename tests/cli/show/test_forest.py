"""Turns in the order and depth they are drawn: lines stay flat, forks are set in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.cli.show.draw import MAX_DEPTH, Node, arrange
from rollbook.transcript.facts import TurnFacts

Shape = list[Any]


def _turn(number: int, parent: int | None, status: str = "completed") -> TurnFacts:
    name = None if parent is None else f"u{parent}"
    nothing: Any = (
        None,
        None,
        None,
        0,
        "",
        None,
        None,
        0,
        None,
        {},
        (),
        (),
        "",
        None,
        None,
        None,
        None,
        (),
        (),
    )
    blank = TurnFacts(number, f"u{number}", *nothing)
    return replace(blank, parent=name, status=status)


def _turns(*parents: int | None, failed: tuple[int, ...] = ()) -> list[TurnFacts]:
    """Turns 1, 2, ... by the number of the turn that each extends."""
    return [_turn(i, parent, "failed" if i in failed else "completed") for i, parent in enumerate(parents, 1)]


def _shape(nodes: list[Node]) -> Shape:
    return [[node.turn.number, *_shape(node.beneath)] for node in nodes]


@pytest.mark.parametrize(
    ("turns", "shape"),
    [
        ([], []),
        (_turns(None, 1, 2, 3), [[1, [2], [3], [4]]]),
        (_turns(None, None, 1), [[1, [3]], [2]]),
        (_turns(None, 1, 1, 2, 4), [[1, [2, [4], [5]], [3]]]),
        (_turns(None, 1, 2, 2, 3), [[1, [2, [3, [5]], [4]]]]),
        (_turns(None, 1, 1, 3, failed=(2,)), [[1, [2], [3], [4]]]),
        (_turns(9), [[1]]),  # what it extends is not there
    ],
)
def test_a_fork_is_indented_and_a_line_is_flat(turns: list[TurnFacts], shape: Shape) -> None:
    """A line is flat beneath its first turn; a fork is set in, but one that failed makes no fork."""
    assert _shape(arrange(turns)) == shape


def test_a_line_of_any_length_is_flat() -> None:
    """2,000 turns after each other are one level."""
    [root] = arrange(_turns(None, *range(1, 2000)))
    assert len(root.beneath) == 1999
    assert not any(node.beneath for node in root.beneath)


@given(st.lists(st.integers(-1, 60), max_size=60), st.sets(st.integers(1, 60)))
def test_every_turn_is_there_once(wanted: list[int], failed: set[int]) -> None:
    """Whatever the forest: every turn once, after the turn it extends, and not too deep."""
    parents = [None if not 0 < parent <= i else parent for i, parent in enumerate(wanted)]
    turns = _turns(*parents, failed=tuple(failed))
    seen: list[int] = []
    waiting = [(node, 1) for node in arrange(turns)[::-1]]
    while waiting:
        node, depth = waiting.pop()
        assert depth <= MAX_DEPTH + 1
        assert node.turn.parent is None or int(node.turn.parent[1:]) in seen
        seen.append(node.turn.number)
        waiting += [(beneath, depth + 1) for beneath in node.beneath[::-1]]
    assert sorted(seen) == [turn.number for turn in turns]


def test_deeply_nested_forks_have_bounded_indentation() -> None:
    """A conversation that forks at every turn is indented to `MAX_DEPTH` levels at most."""
    parents: list[int | None] = [None]
    for i in range(1, 80, 2):
        parents += [i, i]
    nodes, depth = arrange(_turns(*parents)), 0
    while nodes:
        nodes, depth = [beneath for node in nodes for beneath in node.beneath], depth + 1
    assert depth == MAX_DEPTH + 1
