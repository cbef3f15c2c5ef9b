"""A training's queue of groups as it stood, for who follows a training that was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rollbook.store.events import Event
from rollbook.train.data.groups import Standing
from rollbook.train.data.queue_source import QueueSource


class FollowedQueue(QueueSource):
    """The queue, to which is told what was recorded: when it chose, and what it then let go of."""

    def standing(self, events: list[Event], version: int) -> list[Standing]:
        """Take in events, and see how the complete groups stand for a step, in the order in which they
        completed: for who follows a training, and lets go of what it took."""
        if not self._begun:
            self._served = self._served_before = version
            self._take_backlog()
        self._take_in(events)
        return [
            Standing(
                group.name,
                group.trajectories,
                *self._fitting(group, version),
                unfit=self._unfit(group, version),
                lacks_reward=self._lacks_reward(group, version),
            )
            for group in self._complete_groups.values()
        ]

    def choices(self, version: int) -> tuple[list[str], list[str]]:
        """The groups that the next step takes, if it waits for those that run, and if it does not."""
        first, second = (self._chosen(version, waits=waits) for waits in (True, False))
        return [group.name for group in first], [group.name for group in second]

    def let_go(self, names: Iterable[str]) -> None:
        """Keep nothing of some groups, of those that are there."""
        for name in names:
            if (group := self._complete_groups.get(name)) is not None:
                self._remove(group)

    def arrange(self, name: str, trajectories: Sequence[str]) -> None:
        """Put a group's trajectories into another order."""
        group = replace(self._complete_groups[name], trajectories=tuple(trajectories))
        for trajectory_id in trajectories:
            self._of[trajectory_id] = [group if one.name == name else one for one in self._of[trajectory_id]]
        self._complete_groups[name] = group
        self._fit.pop(name, None)

    @property
    def runs_unsampled(self) -> bool:
        """Whether a trajectory runs of which nobody knows yet what version samples it."""
        return self._running.unsampled
