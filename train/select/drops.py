"""What a recipe's rules drop, as columns, with details that are computed only when they are read;
and the dropped members of groups with which the kept samples are compared.

A manifest holds what was used of these members, so that a step needs nothing else of them when
it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollbook.store.events import Json
from rollbook.train.algorithms.rollouts import GroupPeers
from rollbook.train.select.recipe import Candidate, Drop
from rollbook.train.select.samples import Sample

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """What one rule drops.

    Attributes:
        rule: its name.
        at: int64 [D], the candidates' indexes, in order.
        detail: gives the numbers that the rule compared, for the candidate of an index.
    """

    rule: str
    at: Ints
    detail: Callable[[int], Json]


@dataclass(frozen=True, slots=True, eq=False)
class Drops:
    """All that is dropped of N candidates, each by one rule. Iterating gives (number, rule,
    detail).

    Attributes:
        alone: by rules that look at each candidate alone, which are read in the order of
            candidates.
        compared: by rules that compare candidates, which are read after them, rule by rule.
        numbers: int64 [N], the candidates' numbers; None: their indexes.
    """

    alone: tuple[Dropped, ...]
    compared: tuple[Dropped, ...] = ()
    numbers: Ints | None = None

    def __len__(self) -> int:
        return sum(len(dropped.at) for dropped in (*self.alone, *self.compared))

    def __iter__(self) -> Iterator[tuple[int, str, Json]]:
        alone = sorted((at, rule) for rule, dropped in enumerate(self.alone) for at in dropped.at.tolist())
        for at, rule in alone:
            yield self._number(at), self.alone[rule].rule, self.alone[rule].detail(at)
        for dropped in self.compared:
            for at in dropped.at.tolist():
                yield self._number(at), dropped.rule, dropped.detail(at)

    def _number(self, at: int) -> int:
        return at if self.numbers is None else int(self.numbers[at])

    def called(self, numbers: Ints) -> Drops:
        """The same drops, with the candidates numbered as given, int64 [N]."""
        return replace(self, numbers=numbers)


def dropped_members(samples: Sequence[Candidate], drops: Sequence[Drop]) -> list[Json]:
    """The dropped trajectories of the samples' groups, as a manifest records them.

    Each counts once, if all of its samples were dropped, and if its reward is a number.
    """
    groups = {(sample.run, sample.group) for sample in samples if sample.group is not None}
    kept = {sample.trajectory_id for sample in samples}
    members: dict[str, Json] = {}
    for candidate in (drop.sample for drop in drops):
        if (
            (candidate.run, candidate.group) not in groups
            or candidate.trajectory_id in kept
            or not _rewarded(candidate)
        ):
            continue
        member = members.setdefault(
            candidate.trajectory_id,
            {
                "trajectory_id": candidate.trajectory_id,
                "run": candidate.run,
                "group": candidate.group,
                "reward": candidate.reward,
                "tokens": 0,
                "truncated": False,
            },
        )
        member["tokens"] += candidate.learnable
        member["truncated"] = member["truncated"] or candidate.truncated
    return list(members.values())


def peers_of(samples: Sequence[Sample], members: Sequence[Json] | None) -> GroupPeers | None:
    """The members that a manifest names, as an estimator takes them; None where it names none."""
    if not members:
        return None
    places: dict[tuple[str, str | None], int] = {}
    for place, sample in enumerate(samples):
        places.setdefault((sample.run, sample.group), place)
    return GroupPeers(
        beside=np.array([places[member["run"], member["group"]] for member in members], np.int64),
        rewards=np.array([member["reward"] for member in members], np.float64),
        lengths=np.array([member["tokens"] for member in members], np.int64),
        truncated=np.array([member["truncated"] for member in members], np.bool_),
    )


def _rewarded(candidate: Candidate) -> bool:
    return candidate.reward is not None and bool(np.isfinite(candidate.reward))
