"""Complete prompt groups, and trajectories that may become part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.train.select.recipe import Candidate, Drop


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """What a step uses together: a prompt group's trajectories, or (`leaf`) one sample as a group
    of its own.

    Attributes:
        began: its first trajectory's position in the order in which trajectories began.
        completed_s: when it was complete, by the monotonic clock.
    """

    name: str
    began: int
    trajectories: tuple[str, ...]
    leaf: str | None
    completed_s: float


@dataclass(slots=True)
class Begun:
    """A trajectory that may become part of a group."""

    group: str | None
    began: int
    ages: tuple[int, ...]
    """Versions of which its oldest token may be: what was served as it began, until its tokens are known."""
    sampled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The state of a complete group before a step.

    Attributes:
        kept, drops: of its samples, by the recipe.
        unfit: it is dropped whole, at once.
        lacks_reward: one may still come, for which the training waits a while.
    """

    name: str
    trajectories: tuple[str, ...]
    kept: Sequence[Candidate]
    drops: Sequence[Drop]
    unfit: bool
    lacks_reward: bool

    @property
    def leaves(self) -> set[str]:
        """The leaf turns of all of its samples."""
        return {sample.leaf_turn_id for sample in (*self.kept, *(drop.sample for drop in self.drops))}
