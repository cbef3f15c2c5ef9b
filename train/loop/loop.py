"""`rollbook train`: take steps from a source until the configuration's number is reached.

The learning-rate schedule ends at `steps`. If that was changed since the last start, the
resulting change of the rate is reported.

Gives a training the samples of its steps, and explains why no further step can be filled.

At a cut, the first step's samples are taken before anything is written, so that a run without trainable
samples is not started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rollbook import store
from rollbook.engines.hub import hub_reference
from rollbook.store import Event, Store
from rollbook.store.config import suggestion
from rollbook.store.cut import Cut, format_cut, parse_cut
from rollbook.store.errors import ConfigError, IdleError, LaneLockedError, TrainError
from rollbook.store.events import RunOpened
from rollbook.store.fold.history import KINDS, History, family_of, fold_history
from rollbook.store.fold.versions import BINDING, VersionDigests
from rollbook.store.interchange.excerpt import is_excerpt
from rollbook.store.log.writer import LaneWriter
from rollbook.store.safe_paths import place_inside
from rollbook.store.upkeep.checkpoints import finish_removals
from rollbook.store.upkeep.claim import training_claim
from rollbook.train.algorithms.trial import try_out
from rollbook.train.checkpoints.directory import checkpoint_name, remove_left_over
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.phase import FREE, family_in
from rollbook.train.loop.judge import Evaluation, Judge
from rollbook.train.loop.trainer import StepOutcome, Trainer
from rollbook.train.loop.watcher import TrainingStart, Watcher
from rollbook.train.model.lora import check_merges
from rollbook.train.model.shape import read_shape
from rollbook.train.publish.publish import check_head, check_model
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.abandon import go_back
from rollbook.train.select.recipe import Drop, ModelLimits
from rollbook.train.select.samples import Sample
from rollbook.train.select.why_unused import explain
from rollbook.train.source_files import file_digests
from rollbook.train.sources.held_out import HeldOutSamples, learns_from_samples
from rollbook.train.sources.queue_source import QueueSource
from rollbook.train.sources.selection import Selection, Source
from rollbook.train.sources.source import make_source
from rollbook.train.stopping import Stopped, Stopping


def train(
    config: TrainConfig,
    path: Path,
    source: str,
    as_of: str,
    lane: str,
    watcher: Watcher,
    abandon_after: int | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Train a phase to its end. An interrupted phase resumes where it stopped.

    SIGINT and SIGTERM finish the current step, write a checkpoint, and then end the process.

    Args:
        path: folder of the store.
        source: `cut`, the log as it is, or `tail`, as it grows.
        as_of: the cut, as `Store.cut` reads it; lane: the one to write.
        watcher: shows the progress.
        abandon_after: first abandon the steps after this version, and go on from its checkpoint.
        ranks: that it is spread over; None: this process alone.

    Raises:
        RollbookError: the configuration, the model or the log cannot be used.
    """
    log = store.open(path)
    _check(config, source, as_of, log)
    what, stopping = training_claim(config.run, config.policy), Stopping()
    with log.claim(what, "train another run or policy"), log.writer(lane) as writer:
        history, before = _past(config, log, writer, source, abandon_after, watcher)
        family = family_in(history, config, source)
        done = len(history.of_family(family))
        if done >= config.steps and not _is_newest(family, history):
            watcher.note("nothing to do: every step of this configuration is committed")
            return
        cut = _phase_cut(log, history, family, as_of, config.run)
        feed = Feed(config, log, source, cut, family, watcher.warn)
        feed.look(history, done)
        held_out = _held_out(feed, history, watcher)
        trainer = Trainer(config, log, writer, history, family, ranks or Ranks(), watcher.warn, stopping.came)
        judge = _judge(feed, trainer, history, held_out, watcher)
        try:
            _begin(watcher, trainer, feed, done, len(history.steps) - done, before)
            feed.begin(history, trainer, stopping)
            if _steps(watcher, trainer, config, feed, stopping, judge):
                _tell_unfilled(watcher, feed, trainer, taken=trainer.done - done)
        finally:
            trainer.close()
    stopping.end()


def _is_newest(family: str, history: History) -> bool:
    """Whether the newest step is of this family of phases."""
    return bool(history.steps) and family == family_of(history.steps[max(history.steps)].planned.phase)


def _check(config: TrainConfig, source: str, as_of: str, log: Store) -> None:
    """Check what can be checked before anything is written.

    Raises:
        ConfigError: the training is to follow the tail, and asks for a cut, or nobody records its run.
        TrainError: a part of its algorithm does not give what is asked of it; or the log is an excerpt.
    """
    _check_whole(log)
    if source == "tail":
        _check_tail(config, as_of)
        _check_recorded(log, config.run)
    elif config.evaluation is not None and config.evaluation.wait_s:
        raise ConfigError("evaluation.wait_s goes with --source tail: at a cut no agents run")
    try_out(config.algorithm)


def _check_whole(log: Store) -> None:
    """Check that a store holds all that was recorded in it.

    Raises:
        TrainError: it is an excerpt.
    """
    if is_excerpt(log):
        raise TrainError(
            f"{log.path} is an excerpt: it was taken from another store to replay a step, without what that "
            "step did not need. A training would choose from what happens to be left: train on the store "
            "that it was taken from"
        )


def _check_tail(config: TrainConfig, as_of: str) -> None:
    """Check that a training can follow the tail.

    Raises:
        ConfigError: it asks for a cut.
    """
    if as_of != "head":
        raise ConfigError("--as-of goes with --source cut: the tail has no cut to start at")
    if config.recipe.where is not None or config.recipe.source_runs:
        raise ConfigError(
            "recipe.where and recipe.source_runs go with --source cut; on the tail recipe.labels and "
            "recipe.models choose trajectories"
        )
    if config.recipe.min_group is not None and "groups" not in config.algorithm.needs:
        raise ConfigError(
            f"recipe.min_group goes with --source cut: {config.algorithm.algorithm_name} takes samples from "
            "the tail one by one"
        )


def _check_recorded(log: Store, run: str) -> None:
    """Check that somebody records the run, or may: in a store of other runs a new one has to be
    recorded first.

    Raises:
        ConfigError: nobody does.
    """
    runs = sorted(log.runs())
    if run in runs or not runs:
        return
    try:
        with log.claim(f"recording run {run}", "let it go on"):
            pass
    except LaneLockedError:
        return  # its proxy waits for an engine
    raise ConfigError(
        f"run {run!r}: the log has nothing of it, and nobody records it "
        f"({suggestion(run, runs, 'there are')}): "
        "start `rollbook serve` with this run first, or correct the name"
    )


_HeldOut = tuple[HeldOutSamples | None, Cut]


def _held_out(feed: Feed, history: History, watcher: Watcher) -> _HeldOut | None:
    """The samples that evaluations use, and their cut; None without evaluations.

    They stay the same: on the tail they are those that exist at the first evaluation.

    Raises:
        TrainError: there are none at the training's cut, and the algorithm could be evaluated on
            them.
    """
    config, cut = feed.config, feed.cut
    if config.evaluation is None:
        return None
    earlier = history.evaluations_of(feed.family)
    cut = parse_cut(earlier[0].cut) if earlier else cut
    if not learns_from_samples(config.algorithm):
        return None, cut
    try:
        return HeldOutSamples(config, feed.log, cut, feed.limits(history)), cut
    except TrainError as error:
        if feed.source == "cut":
            raise
        watcher.note(f"{error}: rewards alone are evaluated")
        return None, cut


def _judge(
    feed: Feed, trainer: Trainer, history: History, held_out: _HeldOut | None, watcher: Watcher
) -> Judge:
    evaluation = None
    if held_out is not None:
        samples, cut = held_out
        where = (feed.family, samples, format_cut(cut))
        evaluation = Evaluation(feed.config, feed.log, trainer, history, *where)
    return Judge(feed.config, trainer, history, feed.family, evaluation, watcher)


def _begin(
    watcher: Watcher, trainer: Trainer, feed: Feed, done: int, other: int, before: RunOpened | None
) -> None:
    """Record the start of the training, and sync the engines to its version.

    Args:
        done: steps of this configuration; other: those of others.
    """
    config, source = feed.config, feed.source
    watcher.begun(
        TrainingStart(
            run=config.run,
            algorithm=config.algorithm.algorithm_name,
            cut=None if source == "tail" else format_cut(feed.cut),
            step=trainer.step,
            version=trainer.version,
            done=trainer.done,
            steps=config.steps,
            other=other,
        )
    )
    change = rate_change(config, before, done, trainer.policy.learning_rate)
    if change is not None and done < config.steps:
        watcher.note(change)
    trainer.tells(watcher.tell)
    demand = asdict(config.algorithm.demand)
    # With these the proxies know what is used, how much of it a step takes, and for how long.
    settings = config.as_json() | {"source": source, "steps_done": done, "demand": demand}
    settings |= hub_reference(config.model)
    environment = trainer.environment | {"files": file_digests()}
    trainer.write(RunOpened("train", settings, environment=environment))
    trainer.sync_current()


def _tell_unfilled(watcher: Watcher, feed: Feed, trainer: Trainer, *, taken: int) -> None:
    """Report why no further step can be filled.

    Raises:
        TrainError: no step was taken at all.
    """
    why = feed.unfilled(trainer.done)
    if trainer.skipped:
        why += f"\nthe last {trainer.skipped} batches were skipped: the log has each as step.failed"
    if not taken:
        raise TrainError(why)
    watcher.note(why)


def _past(
    config: TrainConfig,
    log: Store,
    writer: LaneWriter,
    source: str,
    abandon_after: int | None,
    watcher: Watcher,
) -> tuple[History, RunOpened | None]:
    """The training history, without the steps to abandon, and the run's last `run.opened` of a training."""
    remove_left_over(place_inside(log.path, str(checkpoint_name(config.run, config.policy, 0).parent)))
    versions, opened = VersionDigests(), list[RunOpened]()
    events = log.events_of(KINDS | BINDING | {RunOpened.KIND})
    history = fold_history(_noted(events, versions, opened, config), config.run, config.policy)
    finish_removals(log, history)
    check_head(config, log, history)
    check_model(config, versions)
    if abandon_after is not None:
        history = go_back(config, source, abandon_after, log, writer, history, versions, watcher.note)
    return history, opened[-1] if opened else None


def _noted(
    events: Iterable[Event], versions: VersionDigests, opened: list[RunOpened], config: TrainConfig
) -> Iterator[Event]:
    """Pass the events on, and collect the digests of versions and the policy's last training from them."""
    for event in events:
        versions.add(event)
        record = event.record
        if isinstance(record, RunOpened) and record.command == "train" and event.run == config.run:
            opened[:] = [record] if record.config.get("policy") == config.policy else opened
        yield event


def _phase_cut(log: Store, history: History, family: str, as_of: str, run: str) -> Cut:
    """The cut that a configuration trains at. It is fixed when the configuration starts, and kept
    on resume.

    Raises:
        ConfigError: `--as-of` names another cut than the one it started at.
    """
    wanted = log.cut(as_of, run)
    earlier = history.of_family(family)
    if not earlier:
        return wanted
    cut = parse_cut(earlier[0].planned.cut)
    if as_of != "head" and cut != wanted:
        raise ConfigError(
            f"--as-of {as_of}: this configuration started at {format_cut(cut)} and goes on there; change "
            "its seed or recipe to start anew"
        )
    return cut


def _steps(
    watcher: Watcher, trainer: Trainer, config: TrainConfig, feed: Feed, stopping: Stopping, judge: Judge
) -> bool:
    """Take the remaining steps; returns whether there were too few samples for them."""
    unfilled = False
    if trainer.done >= config.steps:
        watcher.note("nothing to do: every step of this configuration is committed")
    with stopping:
        with contextlib.suppress(Stopped):
            judge.look(stopping)
            while trainer.in_batch or (trainer.done < config.steps and not judge.stopped and not unfilled):
                if not trainer.in_batch:
                    trainer.wait_for_engines()
                    with stopping.waiting():
                        selection = feed.take(trainer, stopping)
                    if selection is None:
                        unfilled = True
                        continue
                    trainer.begin(selection)
                outcome = trainer.take_step()
                if outcome is None:
                    continue  # skipped
                if (alarm := gap_alarm(config, outcome)) is not None:
                    watcher.warn(alarm)
                trainer.publish()
                watcher.committed(trainer.done, outcome.step, outcome.metrics)
                judge.stepped(outcome, stopping)
        # Also after a crash between the last step and its checkpoint, because a later phase starts from it.
        trainer.ensure_checkpoint()
    if stopping.number is not None and trainer.done < config.steps:
        watcher.note(f"stopped after {trainer.done} of {config.steps} steps: the same command goes on")
    return unfilled


def gap_alarm(config: TrainConfig, outcome: StepOutcome) -> str | None:
    """A warning if an engine seems to have sampled with other weights than those of its version, or
    None.

    Not with `pause = "in_place"`, where tokens are sampled with KV cache entries of older
    weights.
    """
    gap = outcome.metrics.get("engine_logprob_gap")
    kept_cache = config.sync is not None and config.sync.partial_rollout and config.sync.pause == "in_place"
    if gap is None or gap <= config.engine_gap_alarm or kept_cache:
        return None
    return (
        f"step {outcome.step}: an engine's logprobs of tokens of version {outcome.version - 1}, the very one "
        f"that the step starts from, differ by {gap:.3g} from the trainer's (engine_gap_alarm is "
        f"{config.engine_gap_alarm:g}): it computes otherwise, or served other weights. See docs/engines.md"
    )


def rate_change(
    config: TrainConfig, before: RunOpened | None, done: int, rate: Callable[[int, int], float]
) -> str | None:
    """A message about the next step's learning rate, or None if the rate continues as planned.

    Args:
        before: the `run.opened` of the run's previous training.
        done: steps of the configuration that are committed.
        rate: gives the learning rate of a step under a schedule of so many steps.
    """
    decay, planned = config.optimizer.decay, _steps_before(config, before)
    if decay == "constant" or config.optimizer.decay_steps is not None or not done or planned is None:
        return None
    old, new = rate(done, planned), rate(done, config.steps)
    if planned == config.steps or old == new:
        return None
    return (
        f"steps is {config.steps} and was {planned}, which moves the end of the {decay} schedule: the "
        f"learning rate of the next step is {new:.3g}, where it was to be {old:.3g} (optimizer.decay_steps, "
        "set when a training begins, keeps the end where it is)"
    )


def _steps_before(config: TrainConfig, before: RunOpened | None) -> int | None:
    """`steps` of the last start of this same training; None where that was another."""
    if before is None:
        return None
    decides = {key: value for key, value in config.as_json().items() if key not in FREE}
    same = all(_is_same(before.config.get(key, value), value) for key, value in decides.items())
    steps = before.config.get("steps")
    return steps if same and isinstance(steps, int) else None


def _is_same(before: object, now: object) -> bool:
    """Whether a value, or each key that a table had then, is the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(before.get(key, value) == value for key, value in now.items())
    return before == now


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
            ModelError, ConfigError: as `limits`.
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
            ModelError: it cannot be read, or has no weights that the factors of [lora] could be merged into.
            ConfigError: routing is to be replayed, and it has no experts.
        """
        held = history.checkpoints
        shape = read_shape(self.log.folder(held[0].path) if held else self.config.model)
        if self.config.lora is not None:
            check_merges(shape, self.config.lora)
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
