"""Where a step's samples come from: the log at a cut, or its tail. One loop, two sources.

A sample can be used once its trajectory is finished. Supervised fine-tuning at a cut goes over the
samples in epochs, each a permutation decided by the seed. Everything else uses each unit (a sample,
or a whole group) once, in the order in which units became complete.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import TrainError
from rollbook.store.events import Event, TrajectoryFinished
from rollbook.store.trajectory import TrajectoryFold, fold
from rollbook.train.config import GrpoConfig, TrainConfig
from rollbook.train.history import History
from rollbook.train.recipe import Drop, is_candidate, select
from rollbook.train.samples import Sample, all_samples, samples_of

POLL_S = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Samples for the next step, what was dropped on the way, and the cut they were taken at."""

    samples: list[Sample]
    drops: list[Drop]
    cut: Cut


class Source(Protocol):
    """Gives the samples of one step after the other."""

    def take(self, version: int) -> Selection | None:
        """The next step's samples, or None when there are no more. `version` is the trainer's."""

    def unfilled(self, version: int) -> list[Drop]:
        """What the recipe drops of the samples that are left when no further step can be filled."""


class EpochSource:
    """Supervised samples at a cut, in epochs; any step's batch can be computed at once."""

    def __init__(
        self, config: TrainConfig, samples: Sequence[Sample], cut: Cut, done: int, version: int
    ) -> None:
        if isinstance(config.algorithm, GrpoConfig):
            raise TypeError("epochs are for supervised fine-tuning")
        # By name, not in the order of arrival: traffic recorded twice gives the same row of batches.
        candidates = sorted((s for s in samples if is_candidate(s, config.recipe)), key=lambda s: s.name)
        self._samples, drops = select(candidates, config.recipe, config.algorithm, version)
        self._drops = [] if done else drops  # recorded once, with the first step
        self._cut, self._seed, self._size = cut, config.seed, config.algorithm.batch_size
        self._next = done
        if not self._samples:
            raise TrainError(
                f"no sample of splits {config.recipe.splits} at this cut: "
                f"{len(samples)} samples in all, {len(drops)} dropped by the recipe"
            )

    def take(self, version: int) -> Selection | None:
        """The next slice of the endless row of epochs."""
        first = self._next * self._size
        self._next += 1
        places = [divmod(position, len(self._samples)) for position in range(first, first + self._size)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        picked = [self._samples[orders[epoch][place]] for epoch, place in places]
        drops, self._drops = self._drops, []
        return Selection(picked, drops, self._cut)

    def unfilled(self, version: int) -> list[Drop]:
        """Nothing: epochs have no end."""
        return []

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's permutation of the samples, decided by the seed."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._samples))


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is used together: a group's trajectories, or (`leaf`) one sample of a trajectory."""

    trajectories: tuple[str, ...]
    leaf: str | None = None


class QueueSource:
    """Units that are used once each, as they become complete in a stream of events.

    Args:
        more: gives further events (an empty list when there are none yet), or None at the end.
        cut: gives the cut of the events handed out so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        history: History,
        more: Callable[[], list[Event] | None],
        cut: Callable[[], Cut],
    ) -> None:
        self._config, self._more, self._cut = config, more, cut
        self._used = history.consumed() | history.dropped
        self._folding = TrajectoryFold()
        self._groups: dict[str, list[str]] = {}
        self._ready: deque[_Unit] = deque()
        self._held: list[_Unit] = []
        self._waiting_since = 0.0

    def take(self, version: int) -> Selection | None:
        """Wait for enough units, and apply the recipe to them.

        Raises:
            TrainError: nothing came for `idle_timeout_s`.
        """
        algorithm = self._config.algorithm
        wanted = algorithm.groups if isinstance(algorithm, GrpoConfig) else algorithm.batch_size
        units = self._held = []
        while True:
            kept, drops, full = self._choose(units, version)
            if full >= wanted and kept:
                self._forget(units)
                return Selection(kept, drops, self._cut())
            missing = max(wanted - full, 1)
            if not self._fill(missing):
                return None
            units += [self._ready.popleft() for _ in range(missing)]

    def unfilled(self, version: int) -> list[Drop]:
        """Of the units taken and waiting, what the recipe drops; the others stay waiting in the log."""
        return self._choose([*self._held, *self._ready], version)[1]

    def _choose(self, units: list[_Unit], version: int) -> tuple[list[Sample], list[Drop], int]:
        """The units' samples that are kept, those dropped, and how many of the units count."""
        algorithm = self._config.algorithm
        kept: list[Sample] = []
        drops: list[Drop] = []
        full = 0
        for unit in units:
            fit, unfit = select(self._samples(unit), self._config.recipe, algorithm, version)
            kept += fit
            drops += unfit
            # A dropped unit gives its place back, but a flat group has had its turn in the step.
            full += 1 if fit or (unfit and all(d.rule == "zero_variance" for d in unfit)) else 0
        return kept, drops, full

    def _samples(self, unit: _Unit) -> list[Sample]:
        """The unit's samples as of every event handed out: a replay at the cut sees the same rewards."""
        recipe = self._config.recipe
        return [
            sample
            for trajectory_id in unit.trajectories
            for sample in samples_of(self._folding[trajectory_id], recipe.reward_source)
            if is_candidate(sample, recipe)
            and sample.leaf_turn_id not in self._used
            and unit.leaf in (None, sample.leaf_turn_id)
        ]

    def _forget(self, units: list[_Unit]) -> None:
        """Keep nothing of trajectories that no waiting unit needs: the log has them."""
        waiting = {t for unit in self._ready for t in unit.trajectories}
        for trajectory_id in {t for unit in units for t in unit.trajectories} - waiting:
            self._folding.forget(trajectory_id)

    def _fill(self, count: int) -> bool:
        """Wait until so many units are ready; false at the end of the stream."""
        self._waiting_since = time.monotonic()
        while (ready := len(self._ready)) < count:
            events = self._more()
            if events is None:
                return False
            self._take_in(events)
            if len(self._ready) > ready:
                self._waiting_since = time.monotonic()
            elif not events:
                self._check_patience()
                time.sleep(POLL_S)
        return True

    def _check_patience(self) -> None:
        limit = self._config.idle_timeout_s
        if time.monotonic() - self._waiting_since > limit:
            raise TrainError(
                f"no complete batch for {limit:g} s: are agents finishing trajectories of run "
                f"{self._config.run!r}? ({len(self._groups)} groups are incomplete)"
            )

    def _take_in(self, events: list[Event]) -> None:
        """Fold events up to a closed cut, and then look at the trajectories that they finish.

        Not before: of an adopted one another lane may hold the beginning, and be read later.
        """
        for event in events:
            self._folding.add(event)
        for event in events:
            if isinstance(event.record, TrajectoryFinished) and event.record.trajectory_id in self._folding:
                self._add(event.record.trajectory_id)

    def _add(self, trajectory_id: str) -> None:
        trajectory = self._folding[trajectory_id]
        recipe = self._config.recipe
        samples = [s for s in samples_of(trajectory, recipe.reward_source) if is_candidate(s, recipe)]
        fresh = [s for s in samples if s.leaf_turn_id not in self._used]
        wanted = trajectory.run == self._config.run and trajectory.opened.split in recipe.splits
        if not wanted or (samples and not fresh):
            self._folding.forget(trajectory_id)
        elif isinstance(self._config.algorithm, GrpoConfig):
            self._add_to_group(trajectory.opened.group or trajectory_id, trajectory_id)
        else:
            self._ready.extend(_Unit((trajectory_id,), s.leaf_turn_id) for s in fresh)

    def _add_to_group(self, name: str, trajectory_id: str) -> None:
        assert isinstance(self._config.algorithm, GrpoConfig)
        group = self._groups.setdefault(name, [])
        group.append(trajectory_id)
        if len(group) >= self._config.algorithm.group_size:
            unit = _Unit(tuple(self._groups.pop(name)))
            if self._samples(unit):
                self._ready.append(unit)


def make_source(
    config: TrainConfig, log: Store, history: History, source: str, cut: Cut, family: str, version: int
) -> Source:
    """The source that `--source` names, set to go on after the configuration's committed steps.

    Args:
        version: the trainer's; a configuration that goes on keeps the one that it started from.
    """
    if source == "tail":
        tail = log.tail()
        return QueueSource(config, history, tail.poll, tail.cut)
    if isinstance(config.algorithm, GrpoConfig):
        batches = iter([list(log.events(cut))])
        return QueueSource(config, history, lambda: next(batches, None), lambda: cut)
    earlier = history.of_family(family)
    start = earlier[0].planned.policy_version if earlier else version
    trajectories = fold(log.events(cut)).values()
    finished = [t for t in trajectories if t.run == config.run and t.finished is not None]
    samples = all_samples(finished, config.recipe.reward_source)
    return EpochSource(config, samples, cut, len(earlier), start)
