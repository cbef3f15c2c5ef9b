"""A reference to a sample: its name, and what decides whether it is used; its tokens are read only
then. Pure.

Groups and trajectories are numbered once, where samples come from, so that columns hold numbers
instead of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store.events import Json


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample by name, with what decides whether it is used.

    Attributes:
        trained: tokens with loss; 0 where some of its path were erased.
        unknown: of these, tokens whose policy version nobody knows.
        exact: whether each of these has a logprob.
        oldest_version, newest_version: of its oldest and newest trained token of the policy in training; None
            if none has a version of it.
        deciding: the version by which it becomes too old under the recipe it was found by; None likewise.
        success, status, truncated, preferred, infinite, turn_reward, misrouted, stranger: see `Sample`.
        chosen: whether the recipe's SQL conditions hold for its trajectory.
        length: tokens of the whole path.
        lowest_token, highest_token: least and greatest id among them.
        learnable: trained tokens that something precedes.
    """

    run: str
    trajectory_id: str
    leaf_turn_id: str
    name: str
    group: str | None
    split: str
    reward: float | None
    trained: int
    unknown: int
    exact: bool
    oldest_version: int | None
    newest_version: int | None
    deciding: int | None
    success: bool | None
    status: str | None
    truncated: bool
    chosen: bool
    erased: bool
    preferred: bool
    infinite: bool
    turn_reward: float
    length: int
    lowest_token: int
    highest_token: int
    learnable: int
    misrouted: str = ""
    stranger: str = ""

    def deciding_version(self, share: float) -> int | None:
        """The version by which it becomes too old; `share` is that of its recipe."""
        return self.deciding

    @property
    def reference(self) -> Json:
        """Its name in a step's manifest."""
        return {"trajectory_id": self.trajectory_id, "turn_id": self.leaf_turn_id}


NO_GROUP = -1
"""Stands for the group of a sample that has none."""


def numbered(names: Sequence[str | None] | pa.StringArray) -> npt.NDArray[np.int64]:
    """A number from 0 for each distinct name, in the order of first occurrence, [N]; `NO_GROUP` for None."""
    column = names if isinstance(names, pa.Array) else pa.array(names, pa.string())
    codes = column.dictionary_encode().indices.fill_null(NO_GROUP)
    return np.asarray(codes.to_numpy(zero_copy_only=False), np.int64)
