"""Which steps could not be replayed, and which trainings not gone on with, without a trajectory's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.log.store import Store
from rollbook.store.upkeep.find import find_trajectory, live_units
from rollbook.store.upkeep.scan import training_histories
from rollbook.store.upkeep.training_needs import Ended, ended_by


@dataclass(frozen=True, slots=True)
class EndedTraining:
    """What the erasure of a trajectory's tokens ends of the training of one policy in a run."""

    run: str
    policy: str
    ended: Ended


def trainings_ended_by(log: Store, trajectory: str, run: str | None = None) -> list[EndedTraining]:
    """What an erasure with its tokens would end; nothing where one was done, or begun, before.

    Raises:
        UpkeepError: no such trajectory, or several of that name.
        CorruptionError: a file is missing or damaged.
    """
    found = find_trajectory(log, trajectory, run)
    erasures = (erasure for unit in live_units(log) for erasure in unit.erased)
    if any(e.trajectory_id == found.trajectory_id and not e.tokens_kept for e in erasures):
        return []
    ended = [
        EndedTraining(*key, ended_by(history, found.trajectory_id))
        for key, history in sorted(training_histories(log).items())
    ]
    return [one for one in ended if one.ended.steps or one.ended.resume is not None]
