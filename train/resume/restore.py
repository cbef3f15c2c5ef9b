"""Restores a training: loads the nearest checkpoint, and runs the committed steps after it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollbook.store import Store
from rollbook.store.errors import ConfigError, ReplayError, TrainError
from rollbook.store.events import Json
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.config import CriticConfig, TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.environment import fingerprint, with_files
from rollbook.train.model.model import Build, choose_device, set_deterministic
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.base import WholeCheckpoint, check_exact, nearest_whole, put_in_place
from rollbook.train.resume.promise import promise
from rollbook.train.resume.rerun import RerunStep, rerun_steps
from rollbook.train.step.critic import restored_critic
from rollbook.train.step.experiences import Experiences
from rollbook.train.step.reference import ReferenceProcess
from rollbook.train.step.scoring import References


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A training as its last committed step left it.

    Attributes:
        base: the checkpoint that it was restored from.
        references: weights of earlier versions, and the process of the reference, if it has one.
        lora: the training of low-rank factors, if it is one.
    """

    base: WholeCheckpoint
    policy: Policy
    critic: Policy | None
    experiences: Experiences
    references: References
    lora: LoraTraining | None


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
    how = Build(
        config.steps,
        choose_device(config.device),
        config.seed,
        config.threads,
        config.dtype,
        recompute=config.recompute,
    )
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
    state = Restored(whole, policy, critic, Experiences(policy, references, critic), references, lora)
    _run_again(config, log, state, history.between(whole.record, history.next_step), ranks)
    set_deterministic(config.threads)
    return state


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


def fingerprint_of(config: TrainConfig, ranks: Ranks) -> Json:
    """The fingerprint of the environment in which a training's steps run here."""
    device, algorithm = choose_device(config.device), config.algorithm.model_dump()
    return fingerprint(device, algorithm, ranks.described, dtype=config.dtype)


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
                raise TrainError(f"{_difference_text(config, log, replayed, between, ranks)}, or {remedy}")
    except ReplayError as error:
        raise TrainError(f"run {config.run!r} cannot be resumed: {error}; {remedy}") from error


def _difference_text(
    config: TrainConfig, log: Store, replayed: RerunStep, between: list[CommittedStep], ranks: Ranks
) -> str:
    recorded = between[-1].planned.environment
    here = promise(*with_files(log, config.run, recorded, fingerprint_of(config, ranks)))
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
