"""Gives a training the samples of its steps, and explains why no further step can be filled.

At a cut, the first step's samples are taken before anything is written, so that a run without trainable
samples is not started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import ConfigError, IdleError, TrainError
from rollbook.store.fold.history import KINDS, History, fold_history
from rollbook.store.safe_paths import place_inside
from rollbook.train.config.config import TrainConfig
from rollbook.train.loop.trainer import Trainer
from rollbook.train.model.shape import read_shape
from rollbook.train.select.recipe import Drop, ModelLimits
from rollbook.train.select.samples import Sample
from rollbook.train.select.why_unused import explain
from rollbook.train.sources.queue_source import QueueSource
from rollbook.train.sources.selection import Selection, Source
from rollbook.train.sources.source import make_source
from rollbook.train.stopping import Stopping


@dataclass(slots=True)
class Feed:
    """The samples of one training.

    Attributes:
        source: `cut` or `tail`.
        say: called with what is waited for, where nothing comes.
        context: the model's, in tokens, once the source is open.
        first: samples of the first step, if they were prefetched.
        drops: what the recipe dropped while they were prefetched.
    """

    config: TrainConfig
    log: Store
    source: str
    cut: Cut
    family: str
    say: Callable[[str], None] = lambda text: None
    context: int = 0
    samples: Source | None = None
    first: Selection | None = None
    drops: list[Drop] = field(default_factory=list)

    def look(self, history: History, done: int) -> None:
        """Take the first step's samples of a cut, and check that the model can do what is asked of
        it.

        Raises:
            TrainError: there are none, and the run was not trained before.
            ConfigError: as `limits`.
        """
        if done >= self.config.steps:
            return
        self.limits(history)
        if self.source != "cut":
            return
        self._open(history, history.version)
        assert self.samples is not None
        self.first = self._within(self.samples.take(history.version, history.version, self.drops.extend))
        if self.first is None and not history.checkpoints:
            raise TrainError(self._unfilled(history, done))

    def begin(self, history: History, trainer: Trainer, stopping: Stopping) -> None:
        """Follow the tail from here on, and record what was dropped before the training began."""
        if self.source == "tail":
            self._open(history, trainer.version, stopping.in_hand(trainer.keep_served))
        trainer.note_drops(self.drops)

    def _open(self, history: History, version: int, waiting: Callable[[], None] = lambda: None) -> None:
        which = (self.source, self.cut, self.family, version)
        limits = self.limits(history)
        self.context = limits.context
        self.samples = make_source(self.config, self.log, history, *which, waiting, limits, self.say)

    def limits(self, history: History) -> ModelLimits:
        """Limits of the model in training: of the run's checkpoint, or of CONFIG's model for a new run.

        Raises:
            ModelError: it cannot be read.
            ConfigError: routing is to be replayed, and it has no experts.
        """
        held = history.checkpoints
        shape = read_shape(place_inside(self.log.path, held[0].path) if held else self.config.model)
        if not self.config.routing_replay:
            return ModelLimits(shape.vocab, shape.context)
        if shape.mixture is None:
            raise ConfigError("routing_replay: the model has no experts: leave it out")
        return ModelLimits(shape.vocab, shape.context, shape.mixture)

    def take(self, trainer: Trainer, stopping: Stopping) -> Selection | None:
        """The next selection; if there is none, what the recipe dropped is recorded all the same."""
        selection, self.first = self.first, None
        if selection is not None:
            return selection
        assert self.samples is not None
        note_drops = stopping.in_hand(trainer.note_drops)
        try:
            if self.config.mode == "hybrid" and isinstance(self.samples, QueueSource):
                self._score_ahead(self.samples, trainer, stopping)
            selection = self._within(self.samples.take(trainer.version, trainer.served, note_drops))
        except IdleError as error:
            raise IdleError(f"{error}\n{self.unfilled(trainer.done)}") from None
        if selection is None:
            note_drops(self.samples.unfilled(trainer.version))
        return selection

    def _score_ahead(self, samples: QueueSource, trainer: Trainer, stopping: Stopping) -> None:
        """Score the parts of the next rollout batch as they come.

        Raises:
            IdleError: nothing came for `idle_timeout_s`.
        """
        groups, iterations = self.config.algorithm.demand.groups, self.config.num_iters_per_train_update
        note_drops, score = stopping.in_hand(trainer.note_drops), stopping.in_hand(trainer.score_ahead)
        for count in sorted({groups * i // iterations for i in range(1, iterations + 1)} - {0}):
            held = samples.hold(trainer.version, trainer.served, note_drops, count)
            if held is None:
                return
            score(self._cut(held))

    def _within(self, selection: Selection | None) -> Selection | None:
        """The selection, with samples cut to the model's context if the recipe does that."""
        return selection and replace(selection, samples=self._cut(selection.samples))

    def _cut(self, samples: list[Sample]) -> list[Sample]:
        if self.config.recipe.too_long == "drop":
            return samples
        return [sample.within(self.context) for sample in samples]

    def unfilled(self, done: int) -> str:
        """Why the current log fills no further step."""
        return self._unfilled(
            fold_history(self.log.events_of(KINDS), self.config.run, self.config.policy), done
        )

    def _unfilled(self, history: History, done: int) -> str:
        config, tail = self.config, self.source == "tail"
        once, cut = tail or not config.algorithm.cycles, self.log.head() if tail else self.cut
        why = explain(self.log, cut, config, history, once=once, limits=self.limits(history))
        where = f"the log at {format_cut(cut) or 'its beginning'} fills no further one"
        return f"run {config.run!r}: {done} of {config.steps} steps; {where}: {why}"
