"""What a recipe's rules drop, as columns, with details that are made once somebody reads them; and the
dropped members of groups with which the kept samples are compared.

A manifest holds what was used of these members, so that a step needs nothing else of them when it is run
again.
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
        detail: of the candidate of an index, the numbers that the rule compared.
    """

    rule: str
    at: Ints
    detail: Callable[[int], Json]


@dataclass(frozen=True, slots=True, eq=False)
class Drops:
    """All that is dropped of N candidates, each by one rule. Iterating gives (number, rule, detail).

    Attributes:
        alone: by rules that look at each candidate alone, which are read in the order of candidates.
        compared: by rules that compare candidates, which are read after them, rule by rule.
        numbers: int64 [N], what candidates are called; None: by their indexes.
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
        """The same, of candidates that are called by these numbers, int64 [N]."""
        return replace(self, numbers=numbers)


def dropped_members(samples: Sequence[Candidate], drops: Sequence[Drop]) -> list[Json]:
    """What a manifest says of the trajectories of the samples' groups that were dropped.

    Each counts once, if all of its samples were dropped, and if its reward is a number.
    """
    groups = {(sample.run, sample.group) for sample in samples if sample.group is not None}
    kept = {sample.trajectory_id for sample in samples}
    found: dict[str, Json] = {}
    for one in (drop.sample for drop in drops):
        if (one.run, one.group) not in groups or one.trajectory_id in kept or not _rewarded(one):
            continue
        said = found.setdefault(
            one.trajectory_id,
            {
                "trajectory_id": one.trajectory_id,
                "run": one.run,
                "group": one.group,
                "reward": one.reward,
                "tokens": 0,
                "truncated": False,
            },
        )
        said["tokens"] += one.learnable
        said["truncated"] = said["truncated"] or one.truncated
    return list(found.values())


def others_of(samples: Sequence[Sample], said: Sequence[Json] | None) -> GroupPeers | None:
    """What an estimator is told of the members that a manifest names; None where it names none."""
    if not said:
        return None
    places: dict[tuple[str, str | None], int] = {}
    for place, sample in enumerate(samples):
        places.setdefault((sample.run, sample.group), place)
    return GroupPeers(
        beside=np.array([places[one["run"], one["group"]] for one in said], np.int64),
        rewards=np.array([one["reward"] for one in said], np.float64),
        lengths=np.array([one["tokens"] for one in said], np.int64),
        truncated=np.array([one["truncated"] for one in said], np.bool_),
    )


def _rewarded(one: Candidate) -> bool:
    return one.reward is not None and bool(np.isfinite(one.reward))
