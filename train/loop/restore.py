"""Restores a training: the nearest checkpoint, and the committed steps after it run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rollbook.store import Store
from rollbook.store.errors import ReplayError, TrainError
from rollbook.store.events import Json
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.config.config import CriticConfig, TrainConfig
from rollbook.train.config.lora import LoraTraining
from rollbook.train.loop.base import WholeCheckpoint, check_exact, nearest_whole, put_in_place
from rollbook.train.loop.critic import restored_critic
from rollbook.train.loop.environment import differences, fingerprint
from rollbook.train.loop.experiences import Experiences
from rollbook.train.loop.rerun import RerunStep, rerun_steps
from rollbook.train.loop.scoring import References
from rollbook.train.megatron.model import Build, choose_device, set_deterministic
from rollbook.train.megatron.policy import Policy
from rollbook.train.megatron.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A training as its last committed step left it.

    Attributes:
        base: the checkpoint that it was restored from.
        lora: the training of low-rank factors, if it is one.
    """

    base: WholeCheckpoint
    policy: Policy
    critic: Policy | None
    experiences: Experiences
    lora: LoraTraining | None


def restored(
    config: TrainConfig,
    log: Store,
    history: History,
    phase: str,
    ranks: Ranks,
    warn: Callable[[str], None],
) -> Restored:
    """Restore a phase; one that has no step yet begins at the newest checkpoint.

    Args:
        warn: called for each checkpoint that is damaged.

    Raises:
        ModelError: no checkpoint is whole, or the model cannot be spread so.
        TrainError: steps that run again here differ, or one of them cannot be run.
    """
    whole = nearest_whole(log, history, phase, warn)
    goes_on = whole.record.phase == phase and whole.held.optimizer is not None
    how = Build(
        config.steps,
        choose_device(config.device),
        config.seed,
        config.threads,
        config.dtype,
        recompute=config.recompute,
    )
    policy = ranks.policy("actor", whole.shape, config.optimizer, replace(how, lora=config.lora))
    critic = None
    if "values" in config.algorithm.needs:
        wanted = config.critic or CriticConfig()
        critic = restored_critic(ranks, whole.shape, wanted, whole.held, how, goes_on=goes_on)
    references, lora = References(log, history), _lora(config, whole, goes_on=goes_on)
    put_in_place(policy, whole.held, lora, references, goes_on=goes_on)
    check_exact(policy, whole.record, config)
    found = Restored(whole, policy, critic, Experiences(policy, references, critic), lora)
    _run_again(config, log, found, history.between(whole.record, history.next_step), ranks)
    set_deterministic(config.threads)
    return found


def fingerprint_of(config: TrainConfig, ranks: Ranks) -> Json:
    """The fingerprint of what a training's steps run in here."""
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
    config: TrainConfig, log: Store, of: Restored, between: list[CommittedStep], ranks: Ranks
) -> None:
    version = of.base.record.policy_version
    remedy = f"go on from the checkpoint without the steps since: --abandon-after {version}"
    try:
        for replayed in rerun_steps(log, of.policy, of.experiences, between, config.run):
            if replayed.first_difference is not None:
                raise TrainError(f"{_differs(config, replayed, between, ranks)}, or {remedy}")
    except ReplayError as error:
        raise TrainError(f"run {config.run!r} cannot be resumed: {error}; {remedy}") from error


def _differs(config: TrainConfig, replayed: RerunStep, between: list[CommittedStep], ranks: Ranks) -> str:
    here = differences(between[-1].planned.environment, fingerprint_of(config, ranks))
    return (
        f"run {config.run!r} cannot be resumed here: running step {replayed.step} again differs in "
        f"{replayed.first_difference}. What differs here: "
        f"{'; '.join(here) or 'nothing that is known to change bits'}. Resume where it ran"
    )
