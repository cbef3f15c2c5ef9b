"""What if: recorded steps by another rule, beside what was recorded of them, from the same state."""

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
from rollbook.train.batches.batch import Batch, free
from rollbook.train.checkpoints.export import write_model
from rollbook.train.ranks.policy import Policy
from rollbook.train.select.recipe import ModelLimits
from rollbook.train.step.experiences import begins
from rollbook.train.step.predictions import logprobs_of


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Recorded steps beside what another rule makes of them.

    Attributes:
        from_version: policy version of the checkpoint that both sides start from.
        reran: steps that were run again to get from there to the first one.
        differs_at: the first of all these steps that is not as recorded when it is run again; None: all are.
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
        """Whether what the other side is compared with is as recorded."""
        return self.differs_at is None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: which steps, by what.

    Attributes:
        last: the last step; `first` alone where it is the same.
        rescoring: what gives trajectories other rewards; None: the log's count.
        trust_parts, one_rank: as of `replay_step`.
        out: a folder to write the other side's last weights to, as a model; None: they are written nowhere.
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
    asked: Asked,
    run: str | None = None,
    policy: str = "actor",
    tell: Callable[[StepSides], None] = lambda sides: None,
) -> WhatIf:
    """Take recorded steps by another rule, and compare them with what was recorded.

    The recorded side is a replay. The other one starts in the same state, and goes on with weights of its own
    if there are several steps. Its samples are chosen anew of those that each recorded step took or let go.

    Args:
        tell: is given each step as soon as it is done.

    Raises:
        ReplayError: no such committed steps in one training, or they lack what the rule needs.
        ConfigError: a key is unknown or ill-typed, a function gives no rewards.
        TrainError: there is no checkpoint of a reference, a part is not trusted, or the step fails by the
            rule.
        CorruptionError, ModelError, RankError: as of `replay_step`.
    """
    history = history_with(log, asked.first, run, policy)
    steps = _steps(history, asked)
    if asked.trust_parts:
        for name in named_parts(steps[0].planned.algorithm):
            load_part(name)
    preview = changed(steps[0].planned, asked.changes.rule(steps[0].planned))
    of = RunLog(log, history)
    start = find_start(of, steps[0])
    found: list[StepReplay] = []
    sides: list[StepSides] = []
    with Replayer(of, start, trust_parts=asked.trust_parts, one_rank=asked.one_rank) as replayer:
        found += [replayer.run(step, claims=False) for step in start.between]
        mixture = start.shape.mixture if preview.routing_replay else None
        limits = ModelLimits(start.shape.vocab, start.shape.context, mixture)
        selections = Selections(log, history, limits, rewarded=asked.rescoring)
        other = Counterfactual(asked.changes, selections, *replayer.beside(steps[0], preview))
        for step in steps:
            replayed, one = _both(log, history, replayer, other, step)
            found.append(replayed)
            sides.append(one)
            tell(one)
        if asked.out is not None:
            write_model(asked.out, other.policy.stream_weights(), start.path)
    differs = next((one.step for one in found if not one.equal), None)
    reran = [step.planned.step for step in start.between]
    source = str(steps[0].planned.recipe["reward_source"])
    return WhatIf(history.run, policy, start.record.policy_version, reran, sides, differs, source)


def _steps(history: History, asked: Asked) -> list[CommittedStep]:
    """The steps that are asked about, in order.

    Raises:
        ReplayError: they are not all there, or not all of one training; or the first of them goes on with a
            rollout batch.
    """
    first = history.steps[asked.first].planned
    if asked.last < asked.first:
        raise ReplayError(f"--to {asked.last} comes before step {asked.first}: name the last step")
    found = []
    for number in range(asked.first, asked.last + 1):
        if number in history.abandoned:
            continue
        step = history.steps.get(number)
        if step is None:
            raise ReplayError(
                f"--to {asked.last}: run {history.run!r} has no committed step {number} of policy "
                f"{history.policy!r}; the last one is {max(history.steps)}"
            )
        if step.planned.phase != first.phase:
            raise ReplayError(
                f"--to {asked.last}: another training begins with step {number}: ask about it by itself"
            )
        found.append(step)
    if not begins(first):
        assert first.rollout_batch is not None
        begun, last = first.rollout_batch["first_step"], asked.last
        raise ReplayError(
            f"step {asked.first} goes on with the rollout batch of step {begun}, whose samples and "
            f"advantages were decided there: ask about step {begun} with --to {last}"
        )
    return found


def _both(
    log: Store, history: History, replayer: Replayer, other: Counterfactual, step: CommittedStep
) -> tuple[StepReplay, StepSides]:
    """A step on both sides."""
    with KeptGradient() as gradient:
        replayer.look = gradient.keep
        replayed = replayer.run(step, claims=False)
        replayer.look = None
        taken = other.run(step, gradient.compare)
        likeness = None if taken.metrics is None else gradient.compared()
    assert replayer.last is not None
    recorded = _recorded(log, history, step, replayer.last.batch)
    samples = sample_sides(recorded, _taken(taken))
    headless = recorded_algorithm(step.planned.algorithm).head_width == 0
    kl = _kl(other.policy, replayer.policy, taken.batch) if taken.batch is not None and headless else None
    return replayed, StepSides(
        step=step.planned.step,
        policy_version=step.committed.policy_version,
        equal=replayed.equal,
        differs_in=replayed.differs_in,
        samples=samples,
        let_go={"recorded": recorded.rules(), "other": _taken(taken).rules()},
        rewards=differences(samples, "reward"),
        advantages=differences(samples, "advantage"),
        metrics={"recorded": replayed.metrics, "other": taken.metrics},
        gradients=likeness,
        kl=kl,
        apart=_apart(other.policy, replayer.policy),
    )


def _recorded(log: Store, history: History, step: CommittedStep, batch: Batch) -> Side:
    """The side that was recorded. What a training in epochs dropped of all of the log says nothing of one
    slice of it."""
    plan = step.planned
    cycles = recorded_algorithm(plan.algorithm).cycles
    own = range(plan.step, plan.step + 1)
    found = {} if cycles or not begins(plan) else drops_of(log, history.run, history.policy, own)
    dropped = found.get((plan.step, plan.attempt), [])
    chosen = frozenset(ref["turn_id"] for ref in history.batch_of(plan))
    return Side(batch, chosen, {drop.turn_id: drop.rule for drop in dropped})


def _taken(step: OtherStep) -> Side:
    return Side(step.batch, step.chosen, {drop.sample.leaf_turn_id: drop.rule for drop in step.dropped})


def _kl(policy: Policy, recorded: Policy, batch: Batch) -> float | None:
    """Mean of k3 of the trained tokens of a batch, of a policy to another."""
    micro_batches = free(batch.micro_batches)
    own, theirs = (of.forward(micro_batches, logprobs_of, batch.shares) for of in (policy, recorded))
    gaps = [
        (a - b)[torch.from_numpy(micro.loss_mask[:, 1:]).to(a.device)]
        for a, b, micro in zip(own, theirs, micro_batches, strict=True)
    ]
    joined = torch.cat(gaps).double()
    return float(k3(joined).mean()) if joined.numel() else None


def _apart(policy: Policy, recorded: Policy) -> float:
    """The norm of the difference of two policies' weights, over that of the second one's."""
    held, difference, whole = recorded.weights(), 0.0, 0.0
    for name, tensor in policy.stream_weights():
        theirs = held[name].detach().double()
        difference += float((tensor.detach().double() - theirs).square().sum())
        whole += float(theirs.square().sum())
    return (difference / whole) ** 0.5 if whole else 0.0
