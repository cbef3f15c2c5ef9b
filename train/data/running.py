"""Trajectories that still run, and the groups that they will be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rollbook.ingest.staleness.policy import PromptGroup
from rollbook.train.data.groups import Begun


class Running:
    """What is known of trajectories while they run.

    Args:
        grouped: whether groups are used, or each trajectory by itself.
        size: trajectories of a group.
        deciding_share: of a sample's tokens, as the recipe has it.
    """

    def __init__(self, size: int, deciding_share: float, *, grouped: bool) -> None:
        self._grouped, self._size = grouped, size
        self._deciding: Callable[[Iterable[int]], int] = max if deciding_share == 1 else min
        """Of what is known so far of a trajectory, the version by which it becomes too old."""
        self._begun: dict[str, Begun] = {}

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def unsampled(self) -> bool:
        """Whether there is one of which no token is known."""
        return not all(begun.sampled for begun in self._begun.values())

    def begin(self, trajectory_id: str, group: str | None, began: int, ages: tuple[int, ...]) -> None:
        """One begins; its oldest token may be of one of these versions."""
        self._begun[trajectory_id] = Begun(group, began, ages)

    def sampled(self, trajectory_id: str, versions: Iterable[int]) -> None:
        """Tokens of these versions were sampled for one, if it runs."""
        if (begun := self._begun.get(trajectory_id)) is not None and (found := list(versions)):
            begun.ages = (self._deciding([*(begun.ages if begun.sampled else ()), *found]),)
            begun.sampled = True

    def end(self, trajectory_id: str) -> Begun | None:
        """One ends: what was known of it; None of one that is not wanted."""
        return self._begun.pop(trajectory_id, None)

    def groups(
        self, ended: Mapping[str, Mapping[str, Begun]], oldest: Callable[[Sequence[int]], int | None]
    ) -> Iterator[tuple[int, PromptGroup]]:
        """What will be a group once its trajectories finish, with its place in the order of beginning.

        Args:
            ended: group -> those of its trajectories that finished.
            oldest: of versions, the one that counts.
        """
        if not self._grouped:
            for name, begun in self._begun.items():
                yield begun.began, PromptGroup(f"running {name}", oldest(begun.ages), complete=False)
            return
        groups: dict[str, list[Begun]] = {}
        for begun in self._begun.values():
            groups.setdefault(str(begun.group), []).append(begun)
        for group, members in groups.items():
            members += ended.get(group, {}).values()
            if len(members) >= self._size:
                ages = oldest([age for member in members for age in member.ages])
                yield min(m.began for m in members), PromptGroup(f"running {group}", ages, complete=False)
