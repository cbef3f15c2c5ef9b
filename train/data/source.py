"""Where a step's samples come from: the log at a cut, or its tail. One loop, two sources.

A sample can be used once its trajectory is finished. Supervised fine-tuning at a cut goes over the
samples in epochs, each a permutation decided by the seed. Everything else uses each unit (a sample,
or a whole group) once, in the order in which units became complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Event, Json
from rollbook.store.fold.trajectory import fold
from rollbook.train.config.config import GrpoConfig, TrainConfig
from rollbook.train.data.queue_source import QueueSource
from rollbook.train.data.recipe import Drop, ModelLimits, is_candidate, select
from rollbook.train.data.samples import Sample, all_samples
from rollbook.train.data.selection import Evicted, Selection, Source
from rollbook.train.history import History


class EpochSource:
    """Supervised samples at a cut, in epochs; any step's batch can be computed at once."""

    def __init__(
        self,
        config: TrainConfig,
        samples: Sequence[Sample],
        cut: Cut,
        done: int,
        version: int,
        limits: ModelLimits | None = None,
    ) -> None:
        if isinstance(config.algorithm, GrpoConfig):
            raise TypeError("epochs are for supervised fine-tuning")
        # By name, not in the order of arrival: traffic recorded twice gives the same row of batches.
        candidates = sorted((s for s in samples if is_candidate(s, config.recipe)), key=lambda s: s.name)
        self._samples, drops = select(candidates, config.recipe, config.algorithm, version, limits)
        self._drops = [] if done else drops  # recorded once, with the first step
        self._cut, self._seed, self._size = cut, config.seed, config.algorithm.batch_size
        self._next = done

    def take(self, version: int, served: int, evicted: Evicted) -> Selection | None:
        """The next slice of the endless row of epochs; None where there is no sample at all."""
        if not self._samples:
            return None
        picked = self._slice(self._next)
        self._next += 1
        drops, self._drops = self._drops, []
        return Selection(picked, drops, self._cut)

    def _slice(self, number: int) -> list[Sample]:
        first = number * self._size
        places = [divmod(position, len(self._samples)) for position in range(first, first + self._size)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        return [self._samples[orders[epoch][place]] for epoch, place in places]

    def go_on_after(self, consumed: Sequence[Json], skipped: int) -> None:
        """Go on behind the slice that the last step consumed, where up to so many were skipped before it."""
        names = [ref["turn_id"] for ref in consumed]
        for number in range(self._next - 1, self._next + skipped):
            if [sample.leaf_turn_id for sample in self._slice(number)] == names:
                self._next = number + 1
                return

    def unfilled(self, version: int) -> list[Drop]:
        """What the recipe drops where it leaves nothing; else epochs have no end."""
        return self._drops

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's permutation of the samples, decided by the seed."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._samples))


def make_source(
    config: TrainConfig,
    log: Store,
    history: History,
    source: str,
    cut: Cut,
    family: str,
    version: int,
    waiting: Callable[[], None] = lambda: None,
    limits: ModelLimits | None = None,
) -> Source:
    """The source that `--source` names, set to go on after the configuration's committed steps.

    Args:
        version: the trainer's; a configuration that goes on keeps the one that it started from.
        waiting: called again and again while the tail is waited for.
        limits: of the model.
    """
    if source == "tail":
        tail = log.tail()

        def more() -> list[Event]:
            waiting()
            return tail.poll()

        return QueueSource(config, history, more, tail.cut, limits=limits)
    if isinstance(config.algorithm, GrpoConfig):
        batches = iter([list(log.events(cut))])
        return QueueSource(
            config, history, lambda: next(batches, None), lambda: cut, live=False, limits=limits
        )
    earlier = history.of_family(family)
    start = earlier[0].planned.policy_version if earlier else version
    trajectories = fold(log.events(cut)).values()
    finished = [t for t in trajectories if t.run == config.run and t.finished is not None]
    samples = all_samples(finished, config.recipe.reward_source)
    epochs = EpochSource(config, samples, cut, len(earlier), start, limits)
    if earlier and (skipped := sum(history.attempts.values()) - len(history.attempts)):
        epochs.go_on_after(earlier[-1].planned.samples, skipped)
    return epochs
