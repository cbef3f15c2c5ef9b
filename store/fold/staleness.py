"""The staleness policy: which trajectories to admit, which to train on next, which are too old. Pure.

The proxy asks it what to admit, the trainer what to select and what to evict as `stale`: one object decides
all three, so that they cannot contradict each other. Staleness of a group is the trainer's version minus that
of its oldest token.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["windowed", "fifo", "age"]


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """What a step uses as a unit: a group, or a trajectory without a group.

    Attributes:
        name: of the group or trajectory.
        oldest: version of its oldest token, or of what was served when it began; None: unknown.
        complete: whether all of it is finished.
    """

    name: str
    oldest: int | None
    complete: bool


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """How stale training data may be, and in which order it is used.

    Attributes:
        batch: groups of a rollout batch.
        steps: optimizer steps, and so versions, that are made of a rollout batch.
        max_staleness: oldest that a group may be when it is used; None: any age.
        order: `windowed` uses groups as they complete, first those that could not be used in
            time otherwise, and waits for running ones of that kind; `fifo` uses them in the
            order in which they began, and waits for each; `age` uses the oldest complete ones
            and waits for none, so that slow ones may be lost.
    """

    batch: int
    max_staleness: int | None = None
    order: Order = "windowed"
    steps: int = 1

    def capacity(self, outstanding: int, version: int, served: int) -> int | None:
        """How many more groups may begin now; None: any number.

        A group that begins now is `version - served` versions old already, and is used after what is
        outstanding (admitted, and neither used nor dropped), so there is room for (max_staleness - (version -
        served) + 1) * batch - outstanding. Where the engine always serves the trainer's version this is
        equation 3 of AReaL (arXiv:2505.24298). With several steps on a rollout batch, fewer batches begin
        within `max_staleness` versions.

        Args:
            version: the trainer's.
            served: the engines'.
        """
        if self.max_staleness is None:
            return None
        left = self.max_staleness - max(version - served, 0)
        return (left // self.steps + 1) * self.batch - outstanding

    def stale(self, group: PromptGroup, version: int) -> bool:
        """Whether a group is too old for a step that starts from `version`."""
        limit = self.max_staleness
        return limit is not None and group.oldest is not None and version - group.oldest > limit

    def early(
        self, groups: Sequence[PromptGroup], version: int, held: Collection[str] = ()
    ) -> list[PromptGroup]:
        """The groups already available for the next step, at most `batch`: if they are held from
        here on, it will use these, whatever else completes.

        Args:
            groups: complete ones in the order in which they completed (`fifo`: all, as they
                began), and those that still run, without those that are too old already.
            held: names of those that were chosen before; they come first.
        """
        usable = [group for group in groups if not self.stale(group, version)]
        ready = [group for group in usable if group.complete]
        room = self.batch
        match self.order:
            case "fifo":
                first = [group for group in usable if group.name not in held][: self.batch - len(held)]
                ready = list(itertools.takewhile(lambda group: group.complete, first))
            case "age":
                ready.sort(key=lambda group: -1 if group.oldest is None else group.oldest)
            case "windowed":
                due, lacking = self._due(usable, version)
                first = [*due, *ready]
                ready = list({group.name: group for group in first}.values())
                room -= lacking
        own = [group for group in usable if group.name in held]
        return (own + [group for group in ready if group.name not in held])[: max(room, len(own))]

    def _due(self, usable: Sequence[PromptGroup], version: int) -> tuple[list[PromptGroup], int]:
        """The complete groups that this step must use so that later ones can still use all others
        in time, and how many running groups it must wait for.

        Of the groups that will be too old in `ahead + 1` rollout batches, the `ahead` batches
        that follow can use `batch` each: any excess is due now.
        """
        due: list[PromptGroup] = []
        lacking = 0
        taken: set[str] = set()
        ahead = 0
        while ahead * self.batch < len(usable) and ahead <= (self.max_staleness or 0):
            aging = [group for group in usable if self.stale(group, version + (ahead + 1) * self.steps)]
            missing = min(len(aging) - ahead * self.batch, self.batch) - len(due) - lacking
            if missing > 0:
                more = [group for group in aging if group.complete and group.name not in taken][:missing]
                lacking += missing - len(more)
                due += more
                taken |= {group.name for group in more}
            ahead += 1
        return due, lacking
