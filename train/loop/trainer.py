"""Trains one policy on one log: restores its state, takes steps, and records them as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollbook.store import Store, format_cut
from rollbook.store.digest import digest_json
from rollbook.store.errors import AllRejectedError, NotFiniteError, ReplayError, TrainError
from rollbook.store.events import (
    Json,
    Record,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
)
from rollbook.store.fold.history import CommittedStep, History
from rollbook.store.log.writer import LaneWriter
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.clock import Clock, clock, timed
from rollbook.train.config.config import CriticConfig, TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.data.batch import Partition, packed_partition, partition
from rollbook.train.data.mini_batches import mini_batches
from rollbook.train.data.others import dropped_members
from rollbook.train.data.recipe import Drop
from rollbook.train.data.samples import Sample
from rollbook.train.data.selection import Selection
from rollbook.train.loop.base import WholeCheckpoint, check_exact, nearest_whole, put_in_place
from rollbook.train.loop.batch_in_hand import BatchInHand, unfinished
from rollbook.train.loop.critic import restored_critic
from rollbook.train.loop.environment import differences, fingerprint
from rollbook.train.loop.experiences import Experiences
from rollbook.train.loop.publish import Publisher
from rollbook.train.loop.rerun import RerunStep, rerun_steps
from rollbook.train.loop.scoring import References
from rollbook.train.loop.spent import Spent
from rollbook.train.loop.step import run_step, step_seed
from rollbook.train.megatron.model import Build, choose_device, set_deterministic
from rollbook.train.megatron.policy import Policy
from rollbook.train.megatron.ranks import Ranks

SKIPS_IN_A_ROW = 8
"""Most batches in a row that may be skipped, not finite or all rejected: more are not caused by samples."""
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
    ) -> None:
        self._config, self._log = config, log
        self._ranks = ranks
        self._history, self._phase = history, history.phase_to_train(family)
        self._publisher = Publisher(config, log, writer, history)
        if not history.checkpoints:
            self._publisher.adopt_model()
        whole = nearest_whole(log, history, self._phase, warn)
        base, self._like = whole.record, whole.path
        between = history.between(base, history.next_step)
        self._device = choose_device(config.device)
        how = Build(
            config.steps, self._device, config.seed, config.threads, config.dtype, recompute=config.recompute
        )
        self.policy = ranks.policy("actor", whole.shape, config.optimizer, replace(how, lora=config.lora))
        self.critic = self._restored_critic(whole, how)
        self._lora = self._publisher.lora = self._lora_training(whole)
        references = References(log, history)
        self._experiences = Experiences(self.policy, references, self.critic)
        self._restore(whole, between, references)
        self.version = history.version
        self.step = history.next_step
        self.done = len(history.of_family(family))
        self._algorithm = _adapted(config.algorithm, history.of_family(family))
        self._batch = unfinished(log, history, self._phase, config)
        self.served = self.version
        """The version that the engines serve; without configured engines, the last published one."""
        self._held_back: list[Drop] = []
        """Drops of steps that were skipped, until a plan follows."""
        self._recorded_drops: list[Drop] = []
        """Drops that were written with the attempt that is the next one to plan."""
        self.skipped = 0
        """How many steps in a row were skipped."""
        self._taken = 0
        """Committed steps on the rollout batch that is or was last in hand."""
        self._looked = time.monotonic()
        self._spent = Spent()
        self.environment = self._fingerprint()
        """The fingerprint of what its steps run in."""
        if base.policy_version == self.version:
            self._publisher.restored(self.version)

    def _restored_critic(self, whole: WholeCheckpoint, how: Build) -> Policy | None:
        config = self._config
        if "values" not in config.algorithm.needs:
            return None
        wanted, goes_on = config.critic or CriticConfig(), self._goes_on(whole)
        return restored_critic(self._ranks, whole.shape, wanted, whole.held, how, goes_on=goes_on)

    def _goes_on(self, whole: WholeCheckpoint) -> bool:
        """Whether the checkpoint holds the state of this same training."""
        return whole.record.phase == self._phase and whole.held.optimizer is not None

    def _lora_training(self, whole: WholeCheckpoint) -> LoraTraining | None:
        """The training of low-rank factors that goes on from a checkpoint, or begins there."""
        if self._config.lora is None:
            return None
        if self._goes_on(whole) and whole.held.adapter is not None:
            return whole.held.adapter.lora
        return LoraTraining(self._config.lora, self._config.seed, whole.record.policy_version)

    def _restore(self, whole: WholeCheckpoint, between: list[CommittedStep], references: References) -> None:
        base = whole.record
        put_in_place(self.policy, whole.held, self._lora, references, goes_on=self._goes_on(whole))
        check_exact(self.policy, base, self._config)
        remedy = f"go on from the checkpoint without the steps since: --abandon-after {base.policy_version}"
        try:
            for replayed in rerun_steps(self._log, self.policy, self._experiences, between, self._config.run):
                if replayed.first_difference is not None:
                    raise TrainError(f"{self._differs(replayed, between)}, or {remedy}")
        except ReplayError as error:
            raise TrainError(f"run {self._config.run!r} cannot be resumed: {error}; {remedy}") from error
        set_deterministic(self._config.threads)

    def _fingerprint(self) -> Json:
        config = self._config
        return fingerprint(
            self._device, config.algorithm.model_dump(), self._ranks.described, dtype=config.dtype
        )

    def _differs(self, replayed: RerunStep, between: list[CommittedStep]) -> str:
        here = differences(between[-1].planned.environment, self._fingerprint())
        return (
            f"run {self._config.run!r} cannot be resumed here: running step {replayed.step} again differs in "
            f"{replayed.first_difference}. What differs here: "
            f"{'; '.join(here) or 'nothing that is known to change bits'}. Resume where it ran"
        )

    def write(self, *records: Record) -> None:
        """Append records together and wait until they are durable."""
        self._publisher.write(*records)

    def tells(self, listener: Callable[..., None]) -> None:
        """Let somebody hear of all records that are written from now on."""
        self._publisher.on_written = listener

    # Steps ------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The phase that its steps belong to."""
        return self._phase

    @property
    def in_batch(self) -> bool:
        """Whether more steps are to be taken on the rollout batch in hand."""
        return self._batch is not None

    def begin(self, selection: Selection) -> None:
        """Take a rollout batch in hand."""
        self._spent.batch_came()
        demand = self._config.algorithm.demand
        parts = mini_batches(len(selection.samples), demand, step_seed(self._config.seed, self.step))
        compares = self._config.recipe.group_statistics == "all"
        others = dropped_members(selection.samples, selection.drops) if compares else []
        drops = list(selection.drops)
        self._batch = BatchInHand(selection.samples, selection.cut, self.step, parts, drops, others)

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
        self._recorded_drops += (fresh := [*self._held_back, *in_hand.drops])
        in_hand.drops = []
        self.write(*self._drop_records(fresh), plan)
        in_hand.next += 1
        try:
            with timed("data"):
                batch = self._experiences.batch(plan, {s.leaf_turn_id: s for s in in_hand.samples})
            result = run_step(self.policy, plan, batch, critic=self.critic)
        except BaseException as error:
            self.write(StepFailed(plan.step, plan.attempt, plan.policy, repr(error)))
            if not isinstance(error, NotFiniteError | AllRejectedError) or not self._skips(error):
                raise
            self._hold_back(samples, error)
            self._end_batch()
            return None
        self._recorded_drops, self._held_back, self.skipped = [], [], 0
        self.version += 1
        found = result.metrics | self._spent.metrics(counted)
        outcome = StepOutcome(self.step, self.version, found, len(fresh))
        self.write(StepCommitted(plan.step, plan.attempt, plan.policy, self.version, result.digests, found))
        self.step, self.done = self.step + 1, self.done + 1
        self._algorithm = self._algorithm.after(result.metrics)
        in_hand.committed += 1
        self._taken = in_hand.committed
        self._end_batch()
        return outcome

    def _end_batch(self) -> None:
        """Let go of the rollout batch if its last step was taken."""
        if self._batch is not None and self._batch.next == len(self._batch.parts):
            self._batch = None

    def _skips(self, error: NotFiniteError | AllRejectedError) -> bool:
        """Whether the step's samples are to be dropped. Not possible if the weights were updated already."""
        may = isinstance(error, AllRejectedError) or (
            self._config.on_not_finite == "skip" and error.stage != "weights"
        )
        return may and self.skipped < SKIPS_IN_A_ROW

    def _hold_back(self, samples: list[Sample], error: NotFiniteError | AllRejectedError) -> None:
        """Keep the step's drops, and its samples as drops, for the next plan; they count once a step
        commits."""
        self._history.attempts[self.step] = self._attempt
        self.skipped += 1
        rule, detail = "all_rejected", {"error": str(error).partition(": the step is")[0]}
        if isinstance(error, NotFiniteError):
            rule = "not_finite"
            detail = {"stage": error.stage, "error": str(error).partition(": the step")[0]}
        one_each = {sample.leaf_turn_id: sample for sample in samples}
        self._held_back, self._recorded_drops = self._recorded_drops, []
        self._held_back += [Drop(sample, rule, detail) for sample in one_each.values()]

    def _drop_records(self, drops: list[Drop]) -> list[SampleDropped]:
        recipe = digest_json(self._config.recipe.model_dump(mode="json"))
        return [
            SampleDropped(
                d.sample.trajectory_id,
                d.sample.leaf_turn_id,
                d.rule,
                recipe,
                self.step,
                d.detail,
                self._attempt,
            )
            for d in drops
        ]

    @property
    def _attempt(self) -> int:
        return self._history.attempts.get(self.step, 0) + 1

    def note_drops(self, drops: list[Drop]) -> None:
        """Record drops without a following step, if the remaining samples do not fill one."""
        drops, self._held_back = [*self._held_back, *drops], []
        self._recorded_drops += drops
        if drops:
            self.write(*self._drop_records(drops))

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
            input_digests=self._experiences.input_digests(config.algorithm, seed),
            environment=self.environment,
            rollout_batch=in_hand.described(self._divide),
            critic=self._critic_plan(),
            packed=config.packed,
            others=None if in_hand.committed else in_hand.others or None,
            lora=None if self._lora is None else self._lora.described,
        )

    def _divide(self, samples: Sequence[Sample]) -> Partition:
        """Micro-batches of samples, by rank."""
        config, copies = self._config, self._ranks.copies
        unit = 2 if "pairs" in config.algorithm.needs else 1
        if config.tokens_per_micro_batch is None:
            return partition(len(samples), config.micro_batch_size, copies, unit)
        work = self.policy.shape.work
        return packed_partition(samples, config.tokens_per_micro_batch, work, unit, copies)

    def _critic_plan(self) -> Json | None:
        """What the next manifest says of the critic."""
        if self.critic is None:
            return None
        config = self._config.critic or CriticConfig()
        return {
            "optimizer": config.model_dump(mode="json"),
            "learning_rate": self.critic.learning_rate(self.done),
            "alone": self.done < config.alone_steps,
        }

    # Checkpoints and engines ------------------------------------------------------------------

    def publish(self) -> None:
        """After the last step on a rollout batch: write a checkpoint and sync the engines, if either is
        due."""
        if self.in_batch:
            return
        begun = time.perf_counter()
        config, last = self._config, self.done >= self._config.steps
        sync = config.sync is not None and (last or self._due(config.sync.sync_every))
        self.served = self.version if sync or config.sync is None else self.served
        self._publisher.publish(
            self.policy,
            self.version,
            self._like,
            self._phase,
            checkpoint=last or self._due(config.checkpoint_every),
            sync=sync,
            critic=self.critic,
        )
        self._spent.published(begun)

    def _due(self, every: int) -> bool:
        """Whether the steps on the last rollout batch reached or passed a multiple of `every`."""
        return self.done // every > (self.done - self._taken) // every

    def ensure_checkpoint(self) -> None:
        """Write a checkpoint of this version, unless there is one."""
        self._publisher.publish(
            self.policy,
            self.version,
            self._like,
            self._phase,
            checkpoint=True,
            sync=False,
            critic=self.critic,
        )

    def sync_current(self) -> None:
        """Sync the engines to the version that training starts from."""
        self.served = self.version
        self._publisher.sync_current(self.policy, self.version, self._like, self._phase)

    def keep_served(self) -> None:
        """Sync the current version again to restarted engines, while the trainer waits for samples.

        Without it, a restarted engine might never sample, and no step would follow to sync it.
        """
        if time.monotonic() - self._looked > LOOK_S:
            self._publisher.keep_served(self.policy, self.version, self._like, self._phase)
            self._looked = time.monotonic()

    def close(self) -> None:
        """Close connections."""
        self._publisher.close()


def _adapted(algorithm: Algorithm, steps: Sequence[CommittedStep]) -> Algorithm:
    """The algorithm of a training's next step: what adapts follows from the last one that was committed."""
    if not algorithm.adapts or not steps:
        return algorithm
    last = steps[-1]
    return recorded_algorithm(last.planned.algorithm).after(last.committed.metrics)
