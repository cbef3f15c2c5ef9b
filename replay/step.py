"""Replays one optimizer step from the log alone, and compares every stage bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
import torch

from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.events import CheckpointWritten, Json, StepCommitted, StepPlanned
from rollbook.store.fold.history import KINDS, CommittedStep, History, fold_history
from rollbook.store.inside import place_inside
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import recorded_lora
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.loop.base import put_in_place
from rollbook.train.loop.critic import recorded_critic, restored_critic
from rollbook.train.loop.environment import differences, fingerprint
from rollbook.train.loop.experiences import Experiences
from rollbook.train.loop.rerun import RerunStep, rerun_steps
from rollbook.train.loop.scoring import References
from rollbook.train.loop.step import STAGES
from rollbook.train.megatron.model import Build, choose_device
from rollbook.train.megatron.policy import Policy
from rollbook.train.megatron.ranks import Ranks
from rollbook.train.megatron.shape import read_shape


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The result of a replay: a value, printed elsewhere.

    Attributes:
        from_version: policy version of the checkpoint it started from.
        reran: steps run again, the replayed one last.
        differs_at_step, differs_in: the first step and stage that differ, or None.
        stages: stage -> [recorded, found] of the last step run.
        environment: differences between the recorded environment and this one.
    """

    run: str
    step: int
    attempt: int
    policy_version: int
    from_version: int
    reran: list[int]
    differs_at_step: int | None
    differs_in: str | None
    stages: dict[str, list[str | None]]
    metrics: Json
    environment: list[str]

    @property
    def bit_for_bit(self) -> bool:
        """Whether every stage came out as recorded."""
        return self.differs_in is None


def replay_step(
    log: Store, step: int, run: str | None = None, policy: str = "actor", *, trust_parts: bool = False
) -> StepReplay:
    """Restore the state before a step, run it again, and compare.

    Starts at the nearest checkpoint before the step; steps in between are run and compared too.

    Args:
        trust_parts: import and run the parts of somebody's own that the manifest names (`module:name`).

    Raises:
        TrainError: it names some, and they are not trusted, or cannot be loaded.
        RankError: the step was taken by several ranks, and one of those that are started here ended.
        ReplayError: no such committed step, or several runs have one.
        ModelError: the checkpoint's files are damaged.
        CorruptionError: the log is damaged.
    """
    history = _history(log, step, run, policy)
    target = history.steps[step]
    plan = target.planned
    if trust_parts:
        for name in named_parts(plan.algorithm):
            load_part(name)
    base, between = history.base_for(step, plan.phase)
    device = choose_device(str(plan.environment["device"]).split(":")[0])
    with Ranks(*recorded_parallel(plan.environment.get("parallel") or {})) as ranks:
        references = References(log, history)
        trainable, critic = _restored(log, base, plan, device, ranks, references)
        experiences = Experiences(trainable, references, critic)
        reran, last = _run_until_different(log, trainable, experiences, [*between, target], history.run)
        layout = ranks.described
    return StepReplay(
        run=history.run,
        step=step,
        attempt=plan.attempt,
        policy_version=plan.policy_version,
        from_version=base.policy_version,
        reran=reran,
        differs_at_step=None if last.first_difference is None else last.step,
        differs_in=last.first_difference,
        stages={
            s: [last.recorded.get(s), last.found.get(s)]
            for s in STAGES
            if s in last.recorded or s in last.found
        },
        metrics=last.metrics,
        environment=_differences(plan, device, layout),
    )


def _differences(plan: StepPlanned, device: torch.device, layout: Json) -> list[str]:
    """Between the recorded environment and this one."""
    recorded = plan.environment
    here = fingerprint(device, plan.algorithm, layout, dtype=recorded["dtype"])
    return [str(one) for one in differences(recorded, here)]


def _restored(
    log: Store,
    base: CheckpointWritten,
    plan: StepPlanned,
    device: torch.device,
    ranks: Ranks,
    references: References,
) -> tuple[Policy, Policy | None]:
    """The policy, and the critic if the step has one, as they were when a checkpoint was written."""
    checkpoint = place_inside(log.path, base.path)
    shape, held = read_shape(checkpoint), read_checkpoint(checkpoint)
    how = Build(1, device, plan.seed, int(plan.environment["threads"]), plan.environment["dtype"])
    goes_on = base.phase == plan.phase
    optimizer = OptimizerConfig.model_validate_json(orjson.dumps(plan.optimizer))
    lora = None if plan.lora is None else recorded_lora(plan.lora)
    policy = ranks.policy("actor", shape, optimizer, replace(how, lora=None if lora is None else lora.config))
    put_in_place(policy, held, lora, references, goes_on=goes_on)
    if plan.critic is None:
        return policy, None
    return policy, restored_critic(ranks, shape, recorded_critic(plan), held, how, goes_on=goes_on)


def _run_until_different(
    log: Store, policy: Policy, experiences: Experiences, steps: list[CommittedStep], run: str
) -> tuple[list[int], RerunStep]:
    reran: list[int] = []
    for result in rerun_steps(log, policy, experiences, steps, run):
        reran.append(result.step)
        if result.first_difference is not None:
            break
    return reran, result


def _history(log: Store, step: int, run: str | None, policy: str) -> History:
    """The history of the one run that committed the step."""
    runs = sorted(
        {
            e.run
            for e in log.events_of([StepCommitted.KIND])
            if isinstance(e.record, StepCommitted) and e.record.step == step and run in (None, e.run)
        }
    )
    if not runs:
        where = f"run {run!r}" if run else "this store"
        raise ReplayError(
            f"{where} has no committed step {step}; list them: select run, step, status from steps"
        )
    if len(runs) > 1:
        raise ReplayError(f"runs {', '.join(runs)} each have a step {step}: name one with --run")
    history = fold_history(log.events_of(KINDS), runs[0], policy)
    if (back := history.abandoned.get(step)) is not None:
        raise ReplayError(
            f"step {step} of run {runs[0]!r} was abandoned: training went back to version {back.back_to}, "
            f"and on from it as version {back.goes_on_as}; version {back.policy_version}, which the step "
            "made, is no part of the run any more"
        )
    if step not in history.steps:
        raise ReplayError(f"run {runs[0]!r} has no committed step {step} of policy {policy!r}")
    return history
