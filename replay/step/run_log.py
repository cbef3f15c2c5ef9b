"""What the log says of a run beside its steps: each part is read once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rollbook.replay.claims.activations import Activated, activations
from rollbook.replay.claims.selection import Selections, openings
from rollbook.replay.claims.training import Trainings, trainings
from rollbook.store import Store, parse_cut
from rollbook.store.events import StepPlanned, StepVectors, TrajectoryErased
from rollbook.store.fold.history import History
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.manifest_batch import recorded_values
from rollbook.train.select.recipe import UNLIMITED


@dataclass(eq=False)
class RunLog:
    """A run's training of a policy, and what the log says of it.

    Each of its properties raises CorruptionError where the log is damaged.
    """

    log: Store
    history: History

    @cached_property
    def erased(self) -> Mapping[str, str]:
        """Trajectories whose tokens were erased -> the reason that was given."""
        records = [e.record for e in self.log.events_of([TrajectoryErased.KIND])]
        return {
            record.trajectory_id: record.reason
            for record in records
            if isinstance(record, TrajectoryErased) and not record.tokens_kept
        }

    @cached_property
    def selections(self) -> Selections:
        """The checks of what its steps' recipes choose; the caller sets the model's limits."""
        opened = openings(self.log, self.history.run, self.history.policy)
        return Selections(self.log, self.history, UNLIMITED, opened)

    @cached_property
    def activated(self) -> Mapping[int, Sequence[Activated]]:
        """The events that say that an engine serves a version, by version."""
        return activations(self.log, self.history.run, self.history.policy)

    @cached_property
    def trainings(self) -> Trainings:
        """The starts of its trainings, and the attempts at steps that each planned."""
        return trainings(self.log, self.history.run, self.history.policy)

    @cached_property
    def vectors(self) -> Mapping[tuple[int, int], Mapping[str, Singles]]:
        """What the attempts at steps recorded of each trained token: (step, attempt) -> stage -> float32
        [P].

        Raises:
            ReplayError: some of it cannot be read.
        """
        return recorded_vectors(self.log, self.history)


def recorded_vectors(
    log: Store, history: History, only: StepPlanned | None = None
) -> Mapping[tuple[int, int], Mapping[str, Singles]]:
    """What the attempts at steps recorded of each trained token: (step, attempt) -> stage -> float32 [P].

    Args:
        only: the manifest of the only attempt that is wanted; None: all are.

    Raises:
        ReplayError: some of it cannot be read.
    """
    vectors: dict[tuple[int, int], dict[str, Singles]] = {}
    start = None if only is None else parse_cut(only.cut)  # what it recorded came later
    for event in log.events_of([StepVectors.KIND], start=start):
        record = event.record
        if not isinstance(record, StepVectors) or (event.run, record.policy) != (history.run, history.policy):
            continue
        if only is None or (record.step, record.attempt) == (only.step, only.attempt):
            vectors.setdefault((record.step, record.attempt), {})[record.stage] = recorded_values(record)
    return vectors
