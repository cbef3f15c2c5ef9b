"""Which leaf of a trajectory is trained on, where a recipe takes one path of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.store.fold.paths import leaves, path_to
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.train.config.recipe import Paths


def preferred_leaf(
    rule: Paths, parents: Sequence[int], tokens: Sequence[int], delivered: Sequence[bool]
) -> int | None:
    """The leaf that owns all of its path, and alone is trained on; None where all are.

    Args:
        parents: place of each completed turn's parent, -1 for a root.
        tokens: that can be trained, of each turn.
        delivered: whether the client had the turn; of leaves, those come last that it had.
    """
    if rule == "all" or not len(parents):
        return None
    ends = leaves(parents)
    if rule == "last":
        return max(ends, key=lambda leaf: (bool(delivered[leaf]), leaf))
    return max(ends, key=lambda leaf: (sum(tokens[turn] for turn in path_to(leaf, parents)), leaf))


def preferred_turn(rule: Paths, trajectory: Trajectory) -> str | None:
    """The same, of a folded trajectory, by the leaf's name."""
    if rule == "all":
        return None
    done, parents = trajectory.completed()
    leaf = preferred_leaf(
        rule, parents, [_tokens(turn) for turn in done], [bool(turn.delivered) for turn in done]
    )
    return None if leaf is None else done[leaf].turn_id


def _tokens(turn: Turn) -> int:
    assert turn.completed is not None
    altered = turn.completed.logprob_semantics.get("altered")
    return len(turn.completed.completion_ids) if turn.delivered and not altered else 0
