"""Restores a training: loads the nearest checkpoint, and runs the committed steps after it again.

Finds the checkpoint to resume from, the newest undamaged one, and checks whether its weights can
be trained.

Reruns committed steps from the log alone, and compares every stage with what was recorded.

Both resuming a run and replaying a step use it, since the state of a policy is a fold of its steps.

What a manifest holds beside its samples and weights: the settings of its step, and what these
follow from.

Recorded with a step, so that a replay can compute learning rate, seed and micro-batches again,
instead of taking them from the very record that it is to prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollbook.engines.weights.digests import Look
from rollbook.store import Store
from rollbook.store.digest import is_tree
from rollbook.store.errors import ConfigError, ModelError, OutsideError, ReplayError, TrainError
from rollbook.store.events import CheckpointWritten, Json, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch, Partition, packed_partition, partition
from rollbook.train.batches.manifest_batch import begins, samples_at_cut
from rollbook.train.checkpoints.checkpoint import Checkpoint, checkpoint_named
from rollbook.train.config.config import CriticConfig, TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.environment import fingerprint, took_flash, with_files
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.model import Build, choose_device, set_deterministic
from rollbook.train.model.shape import ModelShape, read_shape
from rollbook.train.model.varlen import serves
from rollbook.train.ranks.kept_digests import Trees, trees_of
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.promise import promise
from rollbook.train.select.samples import Sample
from rollbook.train.step.critic import restored_critic
from rollbook.train.step.evidence import Evidence, of_tensors
from rollbook.train.step.experiences import Experiences, References
from rollbook.train.step.reference import ReferenceProcess
from rollbook.train.step.stages import STAGES
from rollbook.train.step.step import StepSettings, run_step


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A training as its last committed step left it.

    Attributes:
        base: the checkpoint that it was restored from.
        references: weights of earlier versions, and the process of the reference, if it has one.
        lora: the training of low-rank factors, if it is one.
        how: it computes.
    """

    base: WholeCheckpoint
    policy: Policy
    critic: Policy | None
    experiences: Experiences
    references: References
    lora: LoraTraining | None
    how: Build


def restored(
    config: TrainConfig,
    log: Store,
    history: History,
    phase: str,
    ranks: Ranks,
    warn: Callable[[str], None],
) -> Restored:
    """Restore a phase; a phase without a step begins at the newest checkpoint.

    Args:
        warn: called for each checkpoint that is damaged.

    Raises:
        ModelError: no checkpoint is whole, or the model cannot be spread so.
        TrainError: steps that run again here differ, or one of them cannot be run.
        ConfigError: the reference cannot have a process of its own here.
    """
    whole, references = nearest_whole(log, history, phase, warn), References(log, history)
    try:
        return _restored(config, log, history, phase, ranks, whole, references)
    except BaseException:
        references.close()
        raise


def _restored(
    config: TrainConfig,
    log: Store,
    history: History,
    phase: str,
    ranks: Ranks,
    whole: WholeCheckpoint,
    references: References,
) -> Restored:
    goes_on = whole.record.phase == phase and whole.held.optimizer is not None
    between = history.between(whole.record, history.next_step)
    how = _build(config, between)
    if config.reference_apart:
        references.apart = _apart(config, whole, how, ranks)
    policy = ranks.policy("actor", whole.shape, config.optimizer, replace(how, lora=config.lora))
    critic = None
    if "values" in config.algorithm.needs:
        wanted = config.critic or CriticConfig()
        critic = restored_critic(ranks, whole.shape, wanted, whole.held, how, goes_on=goes_on)
    lora = _lora(config, whole, goes_on=goes_on)
    put_in_place(policy, whole.held, lora, references, goes_on=goes_on)
    check_exact(policy, whole.record, config)
    state = Restored(whole, policy, critic, Experiences(policy, references, critic), references, lora, how)
    _run_again(config, log, state, between, ranks)
    set_deterministic(config.threads)
    return state


def _build(config: TrainConfig, between: list[CommittedStep]) -> Build:
    """How a training computes; what runs again first, and then goes on, as it did."""
    device, threads = choose_device(config.device), config.threads
    how = Build(config.steps, device, config.seed, threads, config.dtype, recompute=config.recompute)
    as_before = not between or took_flash(between[-1].planned.environment)
    return replace(how, flash=as_before and serves(device, how.type))


def _apart(config: TrainConfig, whole: WholeCheckpoint, how: Build, ranks: Ranks) -> ReferenceProcess:
    """The reference in a process of its own, which starts while the policy is restored.

    Raises:
        ConfigError: ranks were started by others, or leave it no GPU.
    """
    if not ranks.on_this_host:
        raise ConfigError(
            "reference_apart goes with ranks that this command starts on its own host: leave it out, and the "
            "reference's weights take turns with the policy's"
        )
    own = replace(how, recompute=False, trains=False)
    return ReferenceProcess(whole.shape, own, ranks.parallel, ranks.count)


def fingerprint_of(config: TrainConfig, how: Build, ranks: Ranks) -> Json:
    """The fingerprint of the environment in which a training's steps run here."""
    algorithm = config.algorithm.model_dump()
    return fingerprint(how.device, algorithm, ranks.described, dtype=how.dtype, flash=how.flash)


def _lora(config: TrainConfig, whole: WholeCheckpoint, *, goes_on: bool) -> LoraTraining | None:
    """The training of low-rank factors that goes on from a checkpoint, or begins there."""
    if config.lora is None:
        return None
    if goes_on and whole.held.adapter is not None:
        return whole.held.adapter.lora
    return LoraTraining(config.lora, config.seed, whole.record.policy_version)


def _run_again(
    config: TrainConfig, log: Store, state: Restored, between: list[CommittedStep], ranks: Ranks
) -> None:
    version = state.base.record.policy_version
    remedy = f"go on from the checkpoint without the steps since: --abandon-after {version}"
    try:
        for replayed in rerun_steps(log, state.policy, state.experiences, between, config.run):
            if replayed.first_difference is not None:
                here = fingerprint_of(config, state.how, ranks)
                raise TrainError(f"{_difference_text(config, log, replayed, between, here)}, or {remedy}")
    except ReplayError as error:
        raise TrainError(f"run {config.run!r} cannot be resumed: {error}; {remedy}") from error


def _difference_text(
    config: TrainConfig, log: Store, replayed: RerunStep, between: list[CommittedStep], fingerprinted: Json
) -> str:
    recorded = between[-1].planned.environment
    here = promise(*with_files(log, config.run, recorded, fingerprinted))
    return (
        f"run {config.run!r} cannot be resumed here: running step {replayed.step} again differs in "
        f"{replayed.first_difference}. What may change bits here: "
        f"{'; '.join(here.reasons) or 'nothing that is known to'}. Resume where it ran"
    )


def adapted_algorithm(algorithm: Algorithm, steps: Sequence[CommittedStep]) -> Algorithm:
    """The algorithm of a training's next step: what adapts follows from the last committed step."""
    if not algorithm.adapts or not steps:
        return algorithm
    last = steps[-1]
    return recorded_algorithm(last.planned.algorithm).after(last.committed.metrics)


@dataclass(frozen=True, slots=True, eq=False)
class WholeCheckpoint:
    """A checkpoint that was read and matches the digests in the log."""

    record: CheckpointWritten
    path: Path
    shape: ModelShape
    held: Checkpoint


def nearest_whole(log: Store, history: History, phase: str, warn: Callable[[str], None]) -> WholeCheckpoint:
    """The newest undamaged checkpoint to resume from. Damaged ones are removed from the history.

    Args:
        warn: called for each that is damaged.

    Raises:
        ModelError: all are damaged; the message gives the reason for each.
        TrainError: there is none.
    """
    bases = history.bases_for(history.next_step, phase)
    damaged: list[str] = []
    for base in bases:
        try:
            whole = _read(log, base)
        except (ModelError, OutsideError, OSError) as error:
            damaged.append(f"version {base.policy_version}: {error}")
            continue
        for reason, bad in zip(damaged, bases, strict=False):
            history.checkpoints.remove(bad)
            since = len(history.between(base, history.next_step))
            warn(
                f"the checkpoint of {reason}. Going on from version {base.policy_version} instead: {since} "
                "steps since are run again"
            )
        return whole
    there = "\n  ".join(damaged)
    what = f"no checkpoint that run {history.run!r} could go on from is whole"
    raise ModelError(f"{what}: restore one from a copy\n  {there}")


def folder_to_copy(log: Store, history: History, base: WholeCheckpoint) -> Path:
    """The folder whose configuration and tokenizer later checkpoints copy: version 0's, which
    nothing removes; if it is gone all the same, that of the checkpoint that training goes on
    from."""
    begun = [log.folder(c.path) for c in history.checkpoints if c.policy_version == 0]
    return next((folder for folder in begun if (folder / "config.json").is_file()), base.path)


def check_exact(policy: Policy, base: CheckpointWritten, config: TrainConfig) -> None:
    """Check that the weights in place are exactly those of their version: a narrower type may have
    rounded them.

    Raises:
        TrainError: they were rounded.
    """
    if config.dtype == "float32":
        return
    if policy.weights_digest(tree=is_tree(base.weights_digest)).digest != base.weights_digest:
        raise TrainError(
            f"version {base.policy_version} of run {config.run!r} has float32 weights, which "
            f'dtype = "{config.dtype}" would round: train it on in float32, or begin a run of its own '
            "with them (`rollbook export model`, and its folder as `model`)"
        )


def put_in_place(
    policy: Policy, held: Checkpoint, lora: LoraTraining | None, references: References, *, goes_on: bool
) -> None:
    """Load the contents of a checkpoint into the policy.

    Args:
        lora: the training of low-rank factors, if it is one.
        references: reads the base weights of the factors.
        goes_on: whether the checkpoint is one of the same training; else the training begins
            there.

    Raises:
        TrainError: there is no checkpoint of the factors' base weights.
        ModelError: it is damaged.
    """
    if lora is None or not goes_on:
        policy.load_weights(held.weights)
    else:
        policy.load_weights(references.read(lora.base_version, "the base of [lora]: version"))
    if lora is not None:
        went = held.adapter.tensors if goes_on and held.adapter is not None else None
        policy.load_adapter(went or fresh_factors(policy.shape, lora.config, lora.seed))
    policy.load_optimizer_state(held.optimizer or {} if goes_on else {})


def _read(log: Store, base: CheckpointWritten) -> WholeCheckpoint:
    path = log.folder(base.path)
    held = checkpoint_named(path, base.weights_digest)
    return WholeCheckpoint(base, path, read_shape(path), held)


@dataclass(frozen=True, slots=True, eq=False)
class RerunStep:
    """A rerun step: the recorded and the new digest of every stage, and the new metrics.

    Attributes:
        evidence: of the parts of stages, and of what the step started from.
    """

    step: int
    recorded: Json
    new: Json
    metrics: Json
    evidence: Evidence
    batch: Batch

    @property
    def first_difference(self) -> str | None:
        """The first recorded stage whose digest differs, in the order of `STAGES`; None if all are
        equal.

        A stage that was not recorded, because the release did not know it yet, is not compared.
        """
        stages = [stage for stage in STAGES if stage in self.recorded]
        return next((stage for stage in stages if self.recorded[stage] != self.new.get(stage)), None)


def rerun_steps(
    log: Store,
    policy: Policy,
    experiences: Experiences,
    steps: Iterable[CommittedStep],
    run: str,
    look: Look | None = None,
) -> Iterator[RerunStep]:
    """Rerun committed steps on a policy that is in the state before the first of them.

    Each step sets the number of threads that was recorded for it.

    Args:
        run: that the steps are of.
        experiences: of the policy; afterwards of the rollout batch of the last step.
        look: called with each gradient of the policy.

    Raises:
        ReplayError: the log does not hold a sample that a manifest names.
    """
    for step in steps:
        plan = step.planned
        torch.set_num_threads(int(plan.environment["threads"]))
        trees = trees_of(plan.input_digests)
        digests = experiences.input_digests(recorded_algorithm(plan.algorithm), plan.seed, trees)
        inputs = input_evidence(policy, experiences.critic, trees)
        samples = samples_at_cut(log, plan, run) if begins(plan) else {}
        batch = experiences.batch(plan, samples)
        result = run_step(
            policy, settings_of(plan), batch, finite=False, critic=experiences.critic, look=look
        )
        recorded = plan.input_digests | step.committed.digests
        yield RerunStep(
            plan.step, recorded, digests | result.digests, result.metrics, inputs | result.evidence, batch
        )


def input_evidence(policy: Policy, critic: Policy | None, trees: Trees) -> Evidence:
    """The evidence of the tensors that a step starts from."""
    evidence = of_tensors(
        input_weights=policy.weights_digest(tree=trees.weights),
        input_optimizer=policy.optimizer_digest(tree=trees.state),
    )
    if critic is None:
        return evidence
    return evidence | of_tensors(
        critic_input_weights=critic.weights_digest(tree=trees.weights),
        critic_input_optimizer=critic.optimizer_digest(tree=trees.state),
    )


def settings_of(plan: StepPlanned) -> StepSettings:
    """The settings of a step beside its batch, from its manifest."""
    critic = plan.critic or {}
    return StepSettings(
        recorded_algorithm(plan.algorithm),
        plan.learning_rate,
        plan.policy_version,
        critic.get("learning_rate"),
        bool(critic.get("alone")),
        trees_of(plan.input_digests),
    )


def schedule_of(config: TrainConfig, number: int, slice_: int | None) -> Json:
    """The schedule as `step.planned` records it.

    Args:
        number: of the step in its training, from 0.
        slice_: the slice of the epochs that is its rollout batch; None where samples are used
            once.
    """
    return {
        "number": number,
        "steps": config.steps,
        "seed": config.seed,
        "micro_batch_size": config.micro_batch_size,
        "tokens_per_micro_batch": config.tokens_per_micro_batch,
        "slice": slice_,
    }


def divide_samples(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    schedule: Json,
    copies: int,
    work: Callable[[int], int],
) -> Partition:
    """Divide samples into micro-batches, by data-parallel rank.

    Args:
        copies: of the model, between which the samples are shared out.
        work: of a forward pass over a sample of so many tokens.
    """
    unit, most = 2 if "pairs" in algorithm.needs else 1, schedule["tokens_per_micro_batch"]
    if most is None:
        return partition(len(samples), schedule["micro_batch_size"], copies, unit)
    return packed_partition(samples, most, work, unit, copies)
