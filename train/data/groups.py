"""Prompt groups that are complete, and trajectories that may become part of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """What a step uses together: a prompt group's trajectories, or (`leaf`) one sample as a group of its own.

    Attributes:
        began: place of its first trajectory in the order in which trajectories began.
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
