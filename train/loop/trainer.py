"""Trains one policy on one log: restores its state, takes steps, and records them as events.

Besides the trainer, this module holds what it works with: the rollout batch in hand, which is
restored from the log after an interruption; the drops that the next plans record, also where a
step is skipped; and who has the devices that the training shares with the engines it gives
weights to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut, parse_cut
from rollbook.store.digest import digest_json
from rollbook.store.errors import AllRejectedError, NotFiniteError
from rollbook.store.events import Json, Record, SampleDropped, StepCommitted, StepFailed, StepPlanned
from rollbook.store.fold.history import History, all_samples
from rollbook.store.log.writer import LaneWriter
from rollbook.train.batches.batch import Partition, mini_batches
from rollbook.train.batches.manifest_batch import oldest_of, samples_at_cut
from rollbook.train.clock import Clock, Spent, clock, timed
from rollbook.train.config.config import CriticConfig, TrainConfig
from rollbook.train.publish.publish import Publisher, TrainedVersion
from rollbook.train.ranks.kept_digests import Trees
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.restore import (
    adapted_algorithm,
    divide_samples,
    fingerprint_of,
    folder_to_copy,
    restored,
    schedule_of,
    settings_of,
)
from rollbook.train.select.drops import dropped_members
from rollbook.train.select.recipe import Drop, mark_decided
from rollbook.train.select.samples import Sample
from rollbook.train.sources.selection import Selection
from rollbook.train.step.reference import steps_since
from rollbook.train.step.step import run_step, step_seed

LOOK_S = 2.0
"""Seconds between checks of engines while the trainer waits for samples."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did, for the progress display."""

    step: int
    version: int
    metrics: dict[str, Any]
    dropped: int


class Trainer:
    """Takes optimizer steps of one phase. Every step is an event before it runs and after.

    Restoring is a fold: the nearest checkpoint, and the committed steps after it run again.
    """

    def __init__(
        self,
        config: TrainConfig,
        log: Store,
        writer: LaneWriter,
        history: History,
        family: str,
        ranks: Ranks,
        warn: Callable[[str], None] = lambda text: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._log = config, log
        self._ranks = ranks
        self._history, self._phase = history, history.phase_to_train(family)
        self._publisher = Publisher(config, log, writer, history, stopped)
        if not history.checkpoints:
            self._publisher.adopt_model()
        self._turns = DeviceTurns(self._publisher, shares=config.mode == "colocate")
        self._turns.take(history.version)
        state = restored(config, log, history, self._phase, ranks, warn)
        self.policy, self.critic, self._experiences = state.policy, state.critic, state.experiences
        self._like, self._lora = folder_to_copy(log, history, state.base), state.lora
        self.references = state.references
        """Weights of its earlier versions."""
        self._publisher.checkpoints.lora = state.lora
        self._publisher.checkpoints.check(self.policy)
        self._turns.policies = [policy for policy in (self.policy, self.critic) if policy is not None]
        self.version = history.version
        self.step = history.next_step
        self.done = len(history.of_family(family))
        self._algorithm = adapted_algorithm(config.algorithm, history.of_family(family))
        self._since_reference = steps_since(self._algorithm, history.of_family(family))
        """Committed steps since the version that is the reference."""
        self._batch = unfinished(log, history, self._phase, config)
        self._served = self._served_before = self.version
        self._drops = StepDrops()
        self._taken = 0
        """Committed steps on the rollout batch that is or was last in hand."""
        self._looked = time.monotonic()
        self._spent = Spent()
        self.environment = fingerprint_of(config, state.how, ranks)
        """The fingerprint of what its steps run in."""
        if state.base.record.policy_version == self.version:
            self._publisher.restored(self.version)
        self._renew_reference()

    def write(self, *records: Record) -> None:
        """Append records together and wait until they are durable."""
        self._publisher.write(*records)

    def tells(self, listener: Callable[..., None]) -> None:
        """Have a listener called with all records that are written from now on."""
        self._publisher.on_written = listener

    # Steps ------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The phase that its steps belong to."""
        return self._phase

    @property
    def skipped(self) -> int:
        """How many steps in a row were skipped."""
        return self._drops.skipped

    @property
    def in_batch(self) -> bool:
        """Whether more steps are to be taken on the rollout batch in hand."""
        return self._batch is not None

    def score_ahead(self, samples: list[Sample]) -> None:
        """Score a part of the next rollout batch, while waiting for the rest of it."""
        begun, config = time.perf_counter(), self._config
        if samples:
            oldest = oldest_of(config.recipe.model_dump(mode="json"), self.version)
            parts = self._divide(samples)
            how = {"packed": config.packed, "routing_replay": config.routing_replay}
            self._experiences.score_ahead(self._algorithm, samples, parts, oldest, **how)
        self._spent.scored(begun)

    def begin(self, selection: Selection) -> None:
        """Begin a rollout batch, and take the devices, where engines share them."""
        self._spent.batch_came()
        demand = self._config.algorithm.demand
        parts = mini_batches(len(selection.samples), demand, step_seed(self._config.seed, self.step))
        compares = self._config.recipe.group_statistics == "all"
        others = dropped_members(selection.samples, selection.drops) if compares else []
        drops = list(selection.drops)
        self._turns.take(self.version + len(parts))
        scored, iterations = self._experiences.came(selection.samples) or (None, [])
        self._batch = BatchInHand(
            selection.samples,
            selection.cut,
            self.step,
            parts,
            drops,
            others,
            scored=scored,
            iterations=iterations,
            slice=selection.slice,
        )

    def take_step(self) -> StepOutcome | None:
        """Plan, run and commit the next step on the rollout batch in hand.

        Returns:
            None if its numbers are not finite and the configuration skips such samples, or if all of its
            tokens were rejected: they become drops of the next plan.

        Raises:
            AllRejectedError: all of its tokens were rejected, and so were those of the batches before.
            NotFiniteError: its numbers are not finite and the configuration says to stop; or the weights are
                not finite; or too many batches in a row were skipped.
        """
        with clock("manifest") as counted:
            return self._take_step(counted)

    def _take_step(self, counted: Clock) -> StepOutcome | None:
        in_hand = self._batch
        assert in_hand is not None
        samples = [in_hand.samples[i] for i in in_hand.parts[in_hand.next]]
        plan = self._plan(samples, in_hand)
        fresh, in_hand.drops = self._drops.to_record(in_hand.drops), []
        self.write(*self._drop_records(fresh), plan)
        in_hand.next += 1
        try:
            with timed("data"):
                batch = self._experiences.batch(plan, {s.leaf_turn_id: s for s in in_hand.samples})
            result = run_step(self.policy, settings_of(plan), batch, critic=self.critic)
        except BaseException as error:
            self.write(StepFailed(plan.step, plan.attempt, plan.policy, repr(error)))
            if not isinstance(error, Skipped) or not self._drops.may_skip(error, self._config.on_not_finite):
                raise
            bad = error.sample if isinstance(error, NotFiniteError) and in_hand.next == 1 else None
            left = (
                without_sample(in_hand, bad, self._config) if self._config.on_not_finite == "retake" else None
            )
            self._history.attempts[self.step] = plan.attempt
            self._drops.hold_back([s for s in samples if left is None or s not in left.samples], error, plan)
            self._batch = left or in_hand
            self._end_batch()
            return None
        self._drops.committed()
        self.version += 1
        metrics = result.metrics | self._spent.metrics(counted)
        outcome = StepOutcome(self.step, self.version, metrics, len(fresh))
        self.write(
            StepCommitted(
                *(plan.step, plan.attempt, plan.policy, self.version),
                *(result.digests, metrics, result.evidence.described()),
            ),
            *result.evidence.vectors(self._config.record.vectors, plan.step, plan.attempt, plan.policy),
        )
        self.step, self.done = self.step + 1, self.done + 1
        self._algorithm = self._algorithm.after(result.metrics)
        self._since_reference += 1
        in_hand.committed += 1
        self._taken = in_hand.committed
        self._end_batch()
        return outcome

    def _end_batch(self) -> None:
        """Let go of the rollout batch once its last step was taken."""
        if self._batch is not None and self._batch.next == len(self._batch.parts):
            self._batch = None

    @property
    def _attempt(self) -> int:
        return self._history.attempts.get(self.step, 0) + 1

    def note_drops(self, drops: list[Drop]) -> None:
        """Record drops without a following step, if the remaining samples do not fill one."""
        if fresh := self._drops.to_record(drops):
            self.write(*self._drop_records(fresh))

    def _drop_records(self, drops: list[Drop]) -> list[SampleDropped]:
        return drop_records(drops, self._config.recipe.model_dump(mode="json"), self.step, self._attempt)

    def _plan(self, samples: list[Sample], in_hand: BatchInHand) -> StepPlanned:
        config = self._config
        seed = step_seed(config.seed, self.step)
        recipe = config.recipe.model_dump(mode="json")
        return StepPlanned(
            step=self.step,
            attempt=self._attempt,
            policy=config.policy,
            policy_version=self.version,
            phase=self._phase,
            cut=format_cut(in_hand.cut),
            recipe=recipe,
            recipe_digest=digest_json(recipe),
            samples=[s.reference for s in samples],
            partition=self._divide(samples),
            algorithm=self._algorithm.model_dump(mode="json"),
            optimizer=config.optimizer.model_dump(mode="json"),
            learning_rate=self.policy.learning_rate(self.done),
            seed=seed,
            input_digests=self._experiences.input_digests(
                self._algorithm, seed, Trees(weights=self._publisher.checkpoints.trees)
            ),
            environment=self.environment,
            rollout_batch=in_hand.described(self._divide),
            critic=self._critic_plan(),
            packed=config.packed,
            others=None if in_hand.committed else in_hand.others or None,
            lora=None if self._lora is None else self._lora.described,
            routing_replay=config.routing_replay,
            schedule=schedule_of(config, self.done, in_hand.slice),
        )

    def _divide(self, samples: Sequence[Sample]) -> Partition:
        """Micro-batches of samples, by rank."""
        schedule = schedule_of(self._config, self.done, None)
        return divide_samples(samples, self._algorithm, schedule, self._ranks.copies, self.policy.shape.work)

    def _critic_plan(self) -> Json | None:
        """The critic's part of the next manifest."""
        if self.critic is None:
            return None
        config = self._config.critic or CriticConfig()
        return {
            "optimizer": config.model_dump(mode="json"),
            "learning_rate": self.critic.learning_rate(self.done),
            "alone": self.done < config.alone_steps,
        }

    @property
    def served(self) -> int:
        """The version that the engines serve; without configured engines, the last published one."""
        return self._served_before if self._publisher.under_way else self._served

    # Checkpoints and engines ------------------------------------------------------------------

    @property
    def _trained(self) -> TrainedVersion:
        return TrainedVersion(self.policy, self.version, self._like, self._phase, self.critic)

    def publish(self) -> None:
        """After the last step on a rollout batch: write a checkpoint and sync the engines, if either is
        due."""
        if self.in_batch:
            return
        begun = time.perf_counter()
        config, last = self._config, self.done >= self._config.steps
        sync = config.sync is not None and (last or self._due(config.sync.sync_every))
        if sync or config.sync is None:
            self._served_before, self._served = self.served, self.version
        checkpoint = last or self._renews_reference or self._due(config.checkpoint_every)
        offload = self._turns.offload
        self._publisher.publish(
            self._trained, checkpoint=checkpoint, sync=sync, before_cache=offload, last=last
        )
        self._renew_reference()
        self._spent.published(begun)

    def _due(self, every: int) -> bool:
        """Whether the steps on the last rollout batch reached or passed a multiple of `every`."""
        return self.done // every > (self.done - self._taken) // every

    @property
    def _renews_reference(self) -> bool:
        """Whether the newest version is to become the reference of the following steps."""
        interval = self._algorithm.reference_interval
        comes = self.done < self._config.steps and not self.in_batch
        return interval is not None and comes and self._since_reference >= interval

    def _renew_reference(self) -> None:
        """Make the newest version the reference, if it is time to."""
        if not self._renews_reference:
            return
        if not self._publisher.has_checkpoint(self.version):  # a training was killed before it was written
            self.ensure_checkpoint()
        self._publisher.checkpoints.renew_reference(self.version, self._algorithm.reference)
        self._algorithm = self._algorithm.model_copy(update={"reference_version": self.version})
        self._since_reference = 0

    def ensure_checkpoint(self) -> None:
        """Write a checkpoint of the current version, unless there is one."""
        if not self._publisher.has_checkpoint(self.version):
            self._turns.onload()
        self._publisher.publish(self._trained, checkpoint=True, sync=False, last=True)

    def sync_current(self) -> None:
        """Sync the engines to the version that training starts from."""
        self._served_before = self._served = self.version
        self._publisher.sync_current(self._trained, before_cache=self._turns.offload)

    def wait_for_engines(self) -> None:
        """Let the engines use the shared devices while the training waits for samples."""
        if self._turns.shares and not self._turns.away:
            self.sync_current()

    def have_served(self) -> None:
        """Have the engines serve the current version, for an evaluation of agents at it."""
        self._publisher.settle()
        if self._config.sync is not None and self.served != self.version:
            self.sync_current()
        self.wait_for_engines()

    @contextlib.contextmanager
    def with_devices(self) -> Iterator[None]:
        """A context in which the training has the devices, even while it waits; engines that share
        them are given weights again afterwards."""
        if not self._turns.away:
            yield
            return
        self._turns.take(self.version)
        yield
        self.sync_current()

    def keep_served(self) -> None:
        """Sync the current version again to restarted engines, while the trainer waits for samples.

        Without it, a restarted engine might never sample, and no step would follow to sync it.
        """
        if time.monotonic() - self._looked > LOOK_S:
            if lost := self._publisher.lost():
                self._turns.onload()
                self._publisher.keep_served(self._trained, lost)
                self._turns.offload()
            self._looked = time.monotonic()

    def close(self) -> None:
        """Close connections, and end the process of the reference."""
        self.references.close()
        self._publisher.close()


@dataclass(slots=True)
class BatchInHand:
    """A rollout batch on which steps are being taken.

    Attributes:
        first_step: number of the first of these steps.
        parts: positions of the samples of each step.
        drops: to be recorded with the next plan.
        others: dropped members of the samples' groups, with which the samples are compared.
        next: which of the parts comes next.
        committed: how many of these steps are committed.
        scored: the micro-batches in which it was scored ahead; None: it was not.
        iterations: samples of each part that was scored.
        slice: as of the selection.
    """

    samples: list[Sample]
    cut: Cut
    first_step: int
    parts: list[list[int]]
    drops: list[Drop] = field(default_factory=list)
    others: list[Json] = field(default_factory=list)
    next: int = 0
    committed: int = 0
    scored: Partition | None = None
    iterations: Sequence[int] = ()
    slice: int | None = None

    def described(self, divide: Callable[[Sequence[Sample]], Partition]) -> Json | None:
        """Its part of the manifest of its next step.

        Args:
            divide: samples into micro-batches.
        """
        if len(self.parts) == 1 and self.scored is None:
            return None
        description: Json = {"first_step": self.first_step, "number": self.next, "steps": len(self.parts)}
        if self.committed:
            return description
        description |= {
            "samples": [sample.reference for sample in self.samples],
            "partition": divide(self.samples) if self.scored is None else self.scored,
        }
        return description if self.scored is None else description | {"iterations": list(self.iterations)}


def unfinished(log: Store, history: History, phase: str, config: TrainConfig) -> BatchInHand | None:
    """The rollout batch on which a training was taking steps when it was interrupted, if it was.

    Raises:
        ReplayError: the log does not hold one of its samples, or its tokens were erased.
    """
    steps = history.in_hand()
    if not steps or steps[-1].planned.phase != phase:
        return None
    first, last = steps[0].planned, steps[-1].planned
    assert last.rollout_batch is not None
    named, samples = all_samples(first), samples_at_cut(log, first, config.run)
    begun = int(last.rollout_batch["first_step"])
    return BatchInHand(
        [samples[ref["turn_id"]] for ref in named],
        parse_cut(first.cut),
        begun,
        mini_batches(len(named), config.algorithm.demand, step_seed(config.seed, begun)),
        next=last.rollout_batch["number"] + 1,
        committed=len(steps),
        slice=None if first.schedule is None else first.schedule["slice"],
    )


def without_sample(in_hand: BatchInHand, leaf: str | None, config: TrainConfig) -> BatchInHand | None:
    """A rollout batch of which no step is taken yet, without the sample of a leaf turn and the
    other sample of its pair; None where the leaf is not known, or nothing is left."""
    unit, whole = 2 if "pairs" in config.algorithm.needs else 1, in_hand.samples
    units = [whole[start : start + unit] for start in range(0, len(whole), unit)]
    left = [sample for own in units if leaf not in [s.leaf_turn_id for s in own] for sample in own]
    if leaf is None or not left:
        return None
    parts = mini_batches(len(left), config.algorithm.demand, step_seed(config.seed, in_hand.first_step))
    return BatchInHand(
        left, in_hand.cut, in_hand.first_step, parts, others=in_hand.others, slice=in_hand.slice
    )


SKIPS_IN_A_ROW = 8
"""Most batches in a row that may be skipped, not finite or all rejected: more are not caused by samples."""
Skipped = NotFiniteError | AllRejectedError
"""Why a step is skipped."""


@dataclass(slots=True)
class StepDrops:
    """The drops before the next plan.

    Attributes:
        skipped: how many steps in a row were skipped.
    """

    skipped: int = 0
    _held_back: list[Drop] = field(default_factory=list)
    """Drops of steps that were skipped, until a plan follows."""
    _recorded: list[Drop] = field(default_factory=list)
    """Drops that were written with the attempt that is the next one to plan."""

    def to_record(self, drops: Sequence[Drop]) -> list[Drop]:
        """The drops to be written now: these, and those that were held back."""
        fresh, self._held_back = [*self._held_back, *drops], []
        self._recorded += fresh
        return fresh

    def may_skip(self, error: Skipped, on_not_finite: str) -> bool:
        """Whether the step's samples are to be dropped. Not possible if the weights were updated already."""
        may = isinstance(error, AllRejectedError) or (on_not_finite != "stop" and error.stage != "weights")
        return may and self.skipped < SKIPS_IN_A_ROW

    def hold_back(self, samples: Sequence[Sample], error: Skipped, plan: StepPlanned) -> None:
        """Keep the drops of a planned step, and its samples as drops, for the next plan; they count once a
        step commits."""
        self.skipped += 1
        rule, detail = "all_rejected", {"error": str(error).partition(": the step is")[0]}
        if isinstance(error, NotFiniteError):
            rule = "not_finite"
            detail = {"stage": error.stage, "error": str(error).partition(": the step")[0]}
        one_each = {sample.leaf_turn_id: sample for sample in samples}
        self._held_back += mark_decided(self._recorded, plan.policy_version, parse_cut(plan.cut))
        self._held_back += [Drop(sample, rule, detail) for sample in one_each.values()]
        self._recorded = []

    def committed(self) -> None:
        """The step after these drops is committed."""
        self._recorded, self._held_back, self.skipped = [], [], 0


def drop_records(drops: Sequence[Drop], recipe: Json, step: int, attempt: int) -> list[SampleDropped]:
    """The events of drops before an attempt at a step."""
    digest = digest_json(recipe)
    return [
        SampleDropped(
            d.sample.trajectory_id,
            d.sample.leaf_turn_id,
            d.rule,
            digest,
            step,
            d.detail,
            attempt,
            *(d.decided or (None, None)),
        )
        for d in drops
    ]


class DeviceTurns:
    """Takes the devices for the training, and gives them to engines. Where none are shared, it does
    nothing.

    Attributes:
        policies: of the training, once they are made.
        away: whether engines have the devices, and the policies' memory was released.
    """

    def __init__(self, publisher: Publisher, *, shares: bool) -> None:
        self._publisher, self.shares = publisher, shares
        self.policies: Sequence[Policy] = ()
        self.away = False

    def take(self, version: int) -> None:
        """Have the engines release the devices, until the sync of a version.

        Raises:
            EngineError: one does not.
        """
        if self.shares:
            self._publisher.rest(version)
            self.onload()

    def offload(self) -> None:
        """Release the policies' memory: engines take theirs next."""
        for policy in self.policies if self.shares else ():
            policy.offload()
        self.away = self.shares

    def onload(self) -> None:
        """Take the policies' memory again."""
        for policy in self.policies if self.away else ():
            policy.onload()
        self.away = False
