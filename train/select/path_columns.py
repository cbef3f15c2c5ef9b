"""The root-to-leaf paths of trajectories, from the columns of their turns, and which one of them is
trained on where a recipe takes only one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.fold.paths import leaves, owned_paths, path_to
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.train.config.recipe import Paths

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PathColumns:
    """The start of each path, the rows of its turns, which of them it owns, and whether the path is
    one that is taken."""

    starts: Ints
    path: Ints
    owned: Bools
    preferred: Bools


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums, minima and maxima over consecutive runs of an array, with boundaries `starts`, the end
    included; each run has at least one value."""

    starts: Ints

    def sum(self, values: npt.NDArray[Any]) -> Ints:
        """The sum of each."""
        return np.add.reduceat(values.astype(np.int64), self.starts[:-1]) if len(self.starts) > 1 else _EMPTY

    def least(self, values: Ints) -> Ints:
        """The least value of each."""
        return np.minimum.reduceat(values, self.starts[:-1]) if len(self.starts) > 1 else _EMPTY

    def greatest(self, values: Ints) -> Ints:
        """The greatest value of each."""
        return np.maximum.reduceat(values, self.starts[:-1]) if len(self.starts) > 1 else _EMPTY


_EMPTY = np.empty(0, np.int64)


def path_columns(turns: pa.Table, rule: Paths = "all") -> PathColumns:
    """Every path of each trajectory; paths of trajectories that never branch are consecutive rows
    of the table.

    Args:
        rule: which paths are taken.
    """
    place = turns["place"].to_numpy()
    if not len(place):
        none = np.empty(0, np.bool_)
        return PathColumns(np.zeros(1, np.int64), np.empty(0, np.int64), none, none)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    ends = np.append(begins[1:], len(place))
    straight = _straight(turns, begins)
    lengths, path, owned, preferred = list[Ints](), list[Ints](), list[Bools](), list[Bools]()
    at = 0
    for number in [*map(int, np.flatnonzero(~straight)), len(begins)]:
        if at < number:
            lengths.append(ends[at:number] - begins[at:number])
            path.append(np.arange(begins[at], ends[number - 1]))
            owned.append(np.ones(len(path[-1]), np.bool_))
            preferred.append(np.ones(number - at, np.bool_))
        if number < len(begins):
            whole = slice(int(begins[number]), int(ends[number]))
            parents = _parents(turns, whole.start, whole.stop)
            before = preferred_leaf(rule, parents, *_deciding(turns[whole]))
            for owned_path in owned_paths(parents, before):
                lengths.append(np.array([len(owned_path.nodes)]))
                path.append(begins[number] + np.array(owned_path.nodes))
                owned.append(np.array(owned_path.owned))
                preferred.append(np.array([before in (None, owned_path.nodes[-1])]))
        at = number + 1
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    return PathColumns(starts, np.concatenate(path), np.concatenate(owned), np.concatenate(preferred))


def _deciding(turns: pa.Table) -> tuple[list[int], list[bool]]:
    """For each turn, the number of tokens that can be trained, and whether it was delivered."""
    delivered = turns["delivered"].to_pylist()
    rows = zip(delivered, turns["altered"].to_pylist(), turns["completion_length"].to_pylist(), strict=True)
    return [length or 0 if had and not altered else 0 for had, altered, length in rows], delivered


def _straight(turns: pa.Table, begins: Ints) -> Bools:
    """For each trajectory, whether its first turn is a root and each other turn extends the one
    before it."""
    ids, parents = turns["turn_id"].combine_chunks(), turns["parent_turn_id"].combine_chunks()
    before = pa.concat_arrays([ids.slice(0, 1), ids.slice(0, len(ids) - 1)])
    extends = pc.fill_null(pc.equal(parents, before), False).to_numpy(zero_copy_only=False).copy()
    extends[begins] = parents.is_null().to_numpy(zero_copy_only=False)[begins]
    return np.logical_and.reduceat(extends, begins)


def _parents(turns: pa.Table, begin: int, end: int) -> list[int]:
    """Position of each turn's parent within its trajectory, -1 for a root."""
    ids = turns["turn_id"].slice(begin, end - begin).to_pylist()
    places = {turn_id: place for place, turn_id in enumerate(ids)}
    named = turns["parent_turn_id"].slice(begin, end - begin).to_pylist()
    return [places.get(parent, -1) for parent in named]


def preferred_leaf(
    rule: Paths, parents: Sequence[int], tokens: Sequence[int], delivered: Sequence[bool]
) -> int | None:
    """The leaf that owns its whole path, and is the only one trained on; None where all are.

    Args:
        parents: position of each completed turn's parent, -1 for a root.
        tokens: that can be trained, of each turn.
        delivered: whether the client had the turn; leaves that it had count as later than all
            others.
    """
    if rule == "all" or not len(parents):
        return None
    ends = leaves(parents)
    if rule == "last":
        return max(ends, key=lambda leaf: (bool(delivered[leaf]), leaf))
    return max(ends, key=lambda leaf: (sum(tokens[turn] for turn in path_to(leaf, parents)), leaf))


def preferred_turn(rule: Paths, trajectory: Trajectory) -> str | None:
    """The same for a folded trajectory, by the leaf's turn id."""
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
