"""Members of the samples' groups that a recipe dropped, and with which the samples are compared. Pure.

A manifest holds what was used of them, so that a step needs nothing else of them when it is run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollbook.store.events import Json
from rollbook.train.algorithms.rollouts import Others
from rollbook.train.data.recipe import Candidate, Drop
from rollbook.train.data.samples import Sample


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


def others_of(samples: Sequence[Sample], said: Sequence[Json] | None) -> Others | None:
    """What an estimator is told of the members that a manifest names; None where it names none."""
    if not said:
        return None
    places: dict[tuple[str, str | None], int] = {}
    for place, sample in enumerate(samples):
        places.setdefault((sample.run, sample.group), place)
    return Others(
        beside=np.array([places[one["run"], one["group"]] for one in said], np.int64),
        rewards=np.array([one["reward"] for one in said], np.float64),
        lengths=np.array([one["tokens"] for one in said], np.int64),
        truncated=np.array([one["truncated"] for one in said], np.bool_),
    )


def _rewarded(one: Candidate) -> bool:
    return one.reward is not None and bool(np.isfinite(one.reward))
