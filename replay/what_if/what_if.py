"""What if: recorded steps taken by another rule, next to the recorded ones, from the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rollbook.replay.attempts import drops_of
from rollbook.replay.claims.selection import Selections
from rollbook.replay.step.replayer import Replayer
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start
from rollbook.replay.step.step import history_with
from rollbook.replay.verdict import StepReplay
from rollbook.replay.what_if.counterfactual import Changes, Counterfactual, OtherStep, changed
from rollbook.replay.what_if.rescoring import Rescoring
from rollbook.replay.what_if.side_by_side import KeptGradient, Side, StepSides, differences, sample_sides
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.fold.history import CommittedStep, History
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.surrogates import k3
from rollbook.train.batches.batch import Batch, without_experts
from rollbook.train.batches.manifest_batch import begins
from rollbook.train.checkpoints.export import write_model
from rollbook.train.ranks.policy import Policy
from rollbook.train.select.recipe import ModelLimits
from rollbook.train.step.predictions import logprobs_of


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Recorded steps next to what another rule makes of them.

    Attributes:
        from_version: policy version of the checkpoint that both sides start from.
        reran: steps that were run again to get from there to the first one.
        differs_at: the first of all these steps that is not as recorded when it is run again; None: all
            are.
        reward_source: of the recorded steps.
    """

    run: str
    policy: str
    from_version: int
    reran: list[int]
    steps: list[StepSides]
    differs_at: int | None
    reward_source: str

    @property
    def proven(self) -> bool:
        """Whether the recorded side, with which the other is compared, is as recorded."""
        return self.differs_at is None


@dataclass(frozen=True, slots=True)
class WhatIfRequest:
    """What is asked: which steps, and by which changes.

    Attributes:
        last: the last step; equal to `first` where that is the only one.
        rescoring: gives trajectories other rewards; None: the log's count.
        trust_parts, one_rank: as of `replay_step`.
        out: a folder to write the other side's last weights to, as a model; None: they are written
            nowhere.
    """

    first: int
    last: int
    changes: Changes
    rescoring: Rescoring | None = None
    trust_parts: bool = False
    one_rank: bool = False
    out: Path | None = None


def what_if(
    log: Store,
    request: WhatIfRequest,
    run: str | None = None,
    policy: str = "actor",
    tell: Callable[[StepSides], None] = lambda sides: None,
) -> WhatIf:
    """Take recorded steps by another rule, and compare them with what was recorded.

    The recorded side is a replay. The other one starts in the same state, and goes on with weights of
    its own if there are several steps. Its samples are chosen anew from those that each recorded step
    took or let go.

    Args:
        tell: is given each step as soon as it is done.

    Raises:
        ReplayError: no such committed steps in one training, or they lack what the rule needs.
        ConfigError: a key is unknown or ill-typed, a function gives no rewards.
        TrainError: there is no checkpoint of a reference, a part is not trusted, or the step fails by
            the rule.
        CorruptionError, ModelError, RankError: as of `replay_step`.
    """
    history = history_with(log, request.first, run, policy)
    steps = _steps(history, request)
    if request.trust_parts:
        for name in named_parts(steps[0].planned.algorithm):
            load_part(name)
    preview = changed(steps[0].planned, request.changes.rule(steps[0].planned))
    run_log = RunLog(log, history)
    start = find_start(run_log, steps[0])
    replays: list[StepReplay] = []
    sides: list[StepSides] = []
    with Replayer(run_log, start, trust_parts=request.trust_parts, one_rank=request.one_rank) as replayer:
        replays += [replayer.run(step, claims=False) for step in start.between]
        mixture = start.shape.mixture if preview.routing_replay else None
        limits = ModelLimits(start.shape.vocab, start.shape.context, mixture)
        selections = Selections(log, history, limits, rewarded=request.rescoring)
        other = Counterfactual(request.changes, selections, *replayer.beside(steps[0], preview))
        for step in steps:
            replayed, one = _both(log, history, replayer, other, step)
            replays.append(replayed)
            sides.append(one)
            tell(one)
        if request.out is not None:
            write_model(request.out, other.policy.stream_weights(), start.path)
    differs = next((one.step for one in replays if not one.equal), None)
    reran = [step.planned.step for step in start.between]
    source = str(steps[0].planned.recipe["reward_source"])
    return WhatIf(history.run, policy, start.record.policy_version, reran, sides, differs, source)


def _steps(history: History, request: WhatIfRequest) -> list[CommittedStep]:
    """The steps that are asked about, in order.

    Raises:
        ReplayError: they are not all there, or not all of one training; or the first of them goes on with a
            rollout batch.
    """
    first = history.steps[request.first].planned
    if request.last < request.first:
        raise ReplayError(f"--to {request.last} comes before step {request.first}: name the last step")
    steps = []
    for number in range(request.first, request.last + 1):
        if number in history.abandoned:
            continue
        step = history.steps.get(number)
        if step is None:
            raise ReplayError(
                f"--to {request.last}: run {history.run!r} has no committed step {number} of policy "
                f"{history.policy!r}; the last one is {max(history.steps)}"
            )
        if step.planned.phase != first.phase:
            raise ReplayError(
                f"--to {request.last}: another training begins with step {number}: ask about it by itself"
            )
        steps.append(step)
    if not begins(first):
        assert first.rollout_batch is not None
        begun, last = first.rollout_batch["first_step"], request.last
        raise ReplayError(
            f"step {request.first} goes on with the rollout batch of step {begun}, whose samples and "
            f"advantages were decided there: ask about step {begun} with --to {last}"
        )
    return steps


def _both(
    log: Store, history: History, replayer: Replayer, other: Counterfactual, step: CommittedStep
) -> tuple[StepReplay, StepSides]:
    """A step on both sides."""
    with KeptGradient() as gradient:
        replayer.look = gradient.keep
        replayed = replayer.run(step, claims=False)
        replayer.look = None
        other_step = other.run(step, gradient.compare)
        likeness = None if other_step.metrics is None else gradient.compared()
    assert replayer.last is not None
    recorded = _recorded(log, history, step, replayer.last.batch)
    samples = sample_sides(recorded, _other_side(other_step))
    headless = recorded_algorithm(step.planned.algorithm).head_width == 0
    kl = (
        _kl(other.policy, replayer.policy, other_step.batch)
        if other_step.batch is not None and headless
        else None
    )
    return replayed, StepSides(
        step=step.planned.step,
        policy_version=step.committed.policy_version,
        equal=replayed.equal,
        differs_in=replayed.differs_in,
        samples=samples,
        let_go={"recorded": recorded.rules(), "other": _other_side(other_step).rules()},
        rewards=differences(samples, "reward"),
        advantages=differences(samples, "advantage"),
        metrics={"recorded": replayed.metrics, "other": other_step.metrics},
        gradients=likeness,
        kl=kl,
        apart=_apart(other.policy, replayer.policy),
    )


def _recorded(log: Store, history: History, step: CommittedStep, batch: Batch) -> Side:
    """The recorded side. Where a training goes over the log in epochs, what it dropped of all of it says
    nothing of one slice."""
    plan = step.planned
    cycles = recorded_algorithm(plan.algorithm).cycles
    own = range(plan.step, plan.step + 1)
    drops = {} if cycles or not begins(plan) else drops_of(log, history.run, history.policy, own)
    dropped = drops.get((plan.step, plan.attempt), [])
    chosen = frozenset(ref["turn_id"] for ref in history.batch_of(plan))
    return Side(batch, chosen, {drop.turn_id: drop.rule for drop in dropped})


def _other_side(step: OtherStep) -> Side:
    return Side(step.batch, step.chosen, {drop.sample.leaf_turn_id: drop.rule for drop in step.dropped})


def _kl(policy: Policy, recorded: Policy, batch: Batch) -> float | None:
    """Mean of k3 of a policy to the recorded one, over the trained tokens of a batch."""
    micro_batches = without_experts(batch.micro_batches)
    own, theirs = (model.forward(micro_batches, logprobs_of, batch.shares) for model in (policy, recorded))
    gaps = [
        (a - b)[torch.from_numpy(micro.loss_mask[:, 1:]).to(a.device)]
        for a, b, micro in zip(own, theirs, micro_batches, strict=True)
    ]
    joined = torch.cat(gaps).double()
    return float(k3(joined).mean()) if joined.numel() else None


def _apart(policy: Policy, recorded: Policy) -> float:
    """The norm of the difference of two policies' weights, relative to the second's."""
    held, difference, whole = recorded.weights(), 0.0, 0.0
    for name, tensor in policy.stream_weights():
        theirs = held[name].detach().double()
        difference += float((tensor.detach().double() - theirs).square().sum())
        whole += float(theirs.square().sum())
    return (difference / whole) ** 0.5 if whole else 0.0
