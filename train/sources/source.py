"""Sources of a step's samples: the log at a cut, or its tail. Both serve the same loop.

A sample can be used once its trajectory is finished. Supervised fine-tuning at a cut, and
training on recorded preferences, go over their samples in epochs, each a permutation decided by
the seed. Everything else uses each prompt group (or single sample) once, in the order in which
groups became complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Event, Json
from rollbook.store.fold.history import History
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.materialize import Materializer
from rollbook.train.batches.units import Units, sort_units
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import Drop, ModelLimits, mixture_in
from rollbook.train.select.references import find_references
from rollbook.train.select.samples import Sample
from rollbook.train.sources.backlog import Backlog
from rollbook.train.sources.queue_source import QueueSource
from rollbook.train.sources.selection import Evicted, Selection, Source


class EpochUnits:
    """The samples that a recipe keeps at a cut, or pairs of them, in an endless sequence of epochs.

    Args:
        run: that is trained.
        seed: of the training, which decides the order.
        version: of the policy when the first step was taken.
        limits: of the model.
        policy: that is trained; None: versions of all policies count, as if they were one.
    """

    def __init__(
        self,
        log: Store,
        cut: Cut,
        run: str,
        recipe: RecipeConfig,
        algorithm: Algorithm,
        seed: int,
        version: int,
        limits: ModelLimits | None = None,
        policy: str | None = None,
    ) -> None:
        # Sorted by name, not by arrival, so that recording the same traffic again gives the same batches.
        mixture = mixture_in(limits)
        self._references = find_references(log, cut, run, recipe, mixture=mixture, policy=policy)
        applied = sort_units(self._references, log, cut, run, recipe, algorithm, version, limits)
        self._dropped: Units | None = applied
        self._units = replace(applied, drops=())
        self._recorded = self._by_time() if recipe.order == "recorded" and len(self._units) else None
        self._samples = Materializer(log, cut, self._references, run, routing=mixture is not None)
        self._seed, self._size = seed, algorithm.demand.groups

    def __len__(self) -> int:
        return len(self._units)

    def drops(self) -> list[Drop]:
        """The recipe's drops. They can be read once: their columns are freed after that."""
        dropped, self._dropped = self._dropped, None
        return [] if dropped is None else dropped.named(self._references)

    def slice(self, number: int) -> npt.NDArray[np.int64]:
        """The units of a slice of the sequence."""
        if self._recorded is None:
            return epoch_slice(number, self._size, len(self._units), self._seed)
        places = np.arange(number * self._size, (number + 1) * self._size)
        return self._recorded[places % len(self._recorded)]

    def leaves(self, number: int) -> list[str]:
        """The leaf turns of a slice's samples, in order."""
        leaves = self._references.leaf[self._units.units[self.slice(number)].ravel()]
        named: list[str] = self._references.turns["turn_id"].take(pa.array(leaves)).to_pylist()
        return named

    def samples(self, number: int) -> list[Sample]:
        """The samples of a slice, with their tokens.

        Raises:
            CorruptionError, TrainError: as `Materializer.samples`.
        """
        return self._units.samples(self.slice(number), self._samples)

    def _by_time(self) -> npt.NDArray[np.int64]:
        """The units in the order in which the trajectories of their first samples began, int64 [U]; those of
        one trajectory in the order of their turns."""
        first = self._units.units[:, 0]
        ids = self._references.trajectories["trajectory_id"].to_numpy()[self._references.trajectory[first]]
        return np.lexsort((self._references.leaf[first], ids.astype(str)))


class EpochSource:
    """Samples at a cut, or pairs of them, in epochs; any step's batch can be computed at once.

    Only the log positions of tokens are kept in memory. The tokens of the next step are read while the
    current step runs.

    Args:
        units: of the cut.
        done: steps that were taken before.
    """

    def __init__(self, units: EpochUnits, cut: Cut, done: int) -> None:
        self._units, self._cut, self._next = units, cut, done
        self._drops = [] if done else units.drops()  # they are recorded once, with the first step
        self._reader = ThreadPoolExecutor(1, "rollbook-samples")
        self._ahead: tuple[int, Future[list[Sample]]] | None = None

    def take(self, version: int, served: int, evicted: Evicted) -> Selection | None:
        """The next slice of the endless sequence of epochs; None where there is no sample at all."""
        if not len(self._units):
            return None
        step, ahead = self._next, self._ahead
        self._next += 1
        picked = ahead[1].result() if ahead and ahead[0] == step else self._units.samples(step)
        self._ahead = (self._next, self._reader.submit(self._units.samples, self._next))
        drops, self._drops = self._drops, []
        return Selection(picked, drops, self._cut, step)

    def go_on_after(self, consumed: Sequence[Json], skipped: int) -> None:
        """Continue after the slice that the last step consumed; up to `skipped` slices before it were
        skipped."""
        names = [ref["turn_id"] for ref in consumed]
        for number in range(self._next - 1, self._next + skipped):
            if self._units.leaves(number) == names:
                self._next = number + 1
                return

    def unfilled(self, version: int) -> list[Drop]:
        """What the recipe drops if it leaves no sample; otherwise epochs never end."""
        return self._drops


def epoch_slice(step: int, size: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Which of `count` samples a step takes: int64 [size], the step's slice of an endless sequence
    of epochs.

    Each epoch is a permutation of all samples, decided by the seed and its number. Pure.
    """
    places = np.arange(step * size, (step + 1) * size)
    orders = {e: np.random.default_rng([seed, int(e)]).permutation(count) for e in np.unique(places // count)}
    return np.array([orders[place // count][place % count] for place in places], np.int64)


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
    say: Callable[[str], None] = lambda text: None,
) -> Source:
    """The source that `--source` names, positioned after the configuration's committed steps.

    Args:
        version: the trainer's; a configuration that goes on keeps the one that it started from.
        waiting: called repeatedly while the source waits for the tail.
        limits: of the model.
        say: called with what is waited for on the tail, where nothing comes.
    """
    mixture = mixture_in(limits)
    if source == "tail":
        backlog = Backlog(log, log.head(), config, history, mixture)
        tail = log.tail(backlog.cut)

        def more() -> list[Event]:
            waiting()
            return tail.poll()

        return QueueSource(config, history, more, tail.cut, backlog, limits=limits, say=say)
    if not config.algorithm.cycles:
        backlog = Backlog(log, cut, config, history, mixture)
        return QueueSource(config, history, lambda: None, lambda: cut, backlog, live=False, limits=limits)
    earlier = history.of_family(family)
    start = earlier[0].planned.policy_version if earlier else version
    which = (config.run, config.recipe, config.algorithm, config.seed)
    units = EpochUnits(log, cut, *which, start, limits, config.policy)
    epochs = EpochSource(units, cut, len(earlier))
    if earlier and (skipped := sum(history.attempts.values()) - len(history.attempts)):
        epochs.go_on_after(earlier[-1].planned.samples, skipped)
    return epochs
