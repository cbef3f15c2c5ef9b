"""What if: recorded steps taken by another rule, next to the recorded ones, from the same state.

The other side of a what-if: recorded steps taken by another recipe, algorithm or optimizer, one
after another, on a policy of its own.

Nothing of it is recorded. Each of its steps is the recorded one with a manifest of its own, run by
the same code.

Rewards of recorded trajectories by a function of the user's, and the writing of them to the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rollbook.engines.weights.digests import Look
from rollbook.replay.attempts import drops_of
from rollbook.replay.claims.selection import Selections
from rollbook.replay.step.replayer import Replayer
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start, refuse_clients
from rollbook.replay.step.step import history_with
from rollbook.replay.verdict import StepReplay
from rollbook.replay.what_if.changes import Changes, Rule, changed
from rollbook.replay.what_if.gradients import KeptGradient
from rollbook.replay.what_if.side_by_side import Side, StepSides, differences, sample_sides
from rollbook.store import Event, Store
from rollbook.store.errors import ConfigError, ReplayError
from rollbook.store.events import Json, RewardAssigned, RunOpened, StepPlanned
from rollbook.store.fold.history import CommittedStep, History
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.export import as_json
from rollbook.store.interchange.paths import paths
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.parts import NAMED, load_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.surrogates import k3
from rollbook.train.batches.batch import Batch, Partition, mini_batches, without_experts
from rollbook.train.batches.manifest_batch import begins
from rollbook.train.checkpoints.export import write_model
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.restore import divide_samples, settings_of
from rollbook.train.select.drops import dropped_members
from rollbook.train.select.recipe import Drop, ModelLimits
from rollbook.train.select.samples import Sample
from rollbook.train.step.experiences import Experiences
from rollbook.train.step.predictions import logprobs_of
from rollbook.train.step.step import run_step, step_seed


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
            replayed, both = _both(log, history, replayer, other, step)
            replays.append(replayed)
            sides.append(both)
            tell(both)
        if request.out is not None:
            write_model(request.out, other.policy.stream_weights(), start.path)
    differs = next((replay.step for replay in replays if not replay.equal), None)
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
    refuse_clients(history.run, first)
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
    return Side(batch.experience, chosen, {drop.turn_id: drop.rule for drop in dropped})


def _other_side(step: OtherStep) -> Side:
    experience = None if step.batch is None else step.batch.experience
    return Side(experience, step.chosen, {drop.sample.leaf_turn_id: drop.rule for drop in step.dropped})


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


@dataclass(frozen=True, slots=True, eq=False)
class OtherStep:
    """A step as it is taken by another rule.

    Attributes:
        chosen: leaf turns of the samples of the whole rollout batch.
        dropped: what the recipe drops of those that the recorded step took or let go.
        batch, metrics: None where no sample is left for the step, which is then not taken.
    """

    chosen: frozenset[str]
    dropped: Sequence[Drop]
    batch: Batch | None = None
    metrics: Json | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _RolloutBatch:
    """A rollout batch in hand.

    Attributes:
        parts: the positions of each step's samples; empty for steps that none are left for.
    """

    samples: Sequence[Sample]
    dropped: Sequence[Drop]
    parts: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class Counterfactual:
    """Takes the steps of a training by another rule, in order, from the state that it is given.

    Attributes:
        policy: its own; experiences: that policy's.
    """

    changes: Changes
    selections: Selections
    policy: Policy
    experiences: Experiences
    _held: _RolloutBatch | None = field(default=None)
    _adapted: Algorithm | None = field(default=None)
    """The algorithm of the next step, where its keys change from step to step."""

    def run(self, step: CommittedStep, look: Look) -> OtherStep:
        """Take the next step.

        Args:
            look: is given each gradient of the policy.

        Raises:
            ConfigError, ReplayError: the changes make no rule for it, or it lacks what they need.
            TrainError: there is no checkpoint of the reference.
            NotFiniteError, AllRejectedError: the step ends so by this rule.
        """
        plan, rule = step.planned, self._rule(step.planned)
        if begins(plan) or self._held is None:
            self._held = self._begun(step, rule)
        held = self._held
        chosen = frozenset(sample.leaf_turn_id for sample in held.samples)
        number = 0 if plan.rollout_batch is None else plan.rollout_batch["number"]
        at = held.parts[number] if number < len(held.parts) else []
        if not at:
            return OtherStep(chosen, held.dropped)
        manifest = self._manifest(plan, rule, at)
        self.policy.seed_step(plan.seed)
        batch = self.experiences.batch(manifest, {s.leaf_turn_id: s for s in held.samples})
        critic = self.experiences.critic
        result = run_step(self.policy, settings_of(manifest), batch, critic=critic, look=look)
        if rule.algorithm.adapts:
            self._adapted = rule.algorithm.after(result.metrics)
        return OtherStep(chosen, held.dropped, batch, result.metrics)

    def _rule(self, plan: StepPlanned) -> Rule:
        """The rule of the step; keys that adapt are as its own earlier steps have left them."""
        rule = self.changes.rule(plan)
        if self._adapted is None:
            return rule
        renewed = {"reference_version": rule.algorithm.reference} if rule.algorithm.reference_interval else {}
        return replace(rule, algorithm=self._adapted.model_copy(update=renewed))

    def _begun(self, step: CommittedStep, rule: Rule) -> _RolloutBatch:
        """The rollout batch that the rule makes of what the recorded one was made of."""
        kept, dropped = self.selections.anew(step, rule.recipe, rule.algorithm)
        batch = step.planned.rollout_batch
        if not kept:
            return _RolloutBatch(kept, dropped, [])
        begun = step.planned.step if batch is None else batch["first_step"]
        seed = step_seed(_schedule(step.planned)["seed"], begun)
        return _RolloutBatch(kept, dropped, mini_batches(len(kept), rule.algorithm.demand, seed))

    def _manifest(self, plan: StepPlanned, rule: Rule, at: Sequence[int]) -> StepPlanned:
        """The manifest of a step on some of the samples in hand."""
        held = self._held
        assert held is not None
        samples = [held.samples[i] for i in at]
        compares = rule.recipe.group_statistics == "all"
        manifest = replace(
            changed(plan, rule),
            samples=[sample.reference for sample in samples],
            partition=self._divided(plan, rule, samples),
            others=(dropped_members(held.samples, held.dropped) or None) if compares else None,
            rollout_batch=self._described(plan, rule),
        )
        if not rule.trains_otherwise:
            return manifest
        schedule = _schedule(plan)
        return replace(
            manifest, learning_rate=self.policy.learning_rate(schedule["number"], schedule["steps"])
        )

    def _described(self, plan: StepPlanned, rule: Rule) -> Json | None:
        """What the manifest says of the rollout batch."""
        held, batch = self._held, plan.rollout_batch
        assert held is not None
        if batch is None or len(held.parts) == 1:
            return None
        description = {key: batch[key] for key in ("first_step", "number")} | {"steps": len(held.parts)}
        if not begins(plan):
            return description
        refs = [sample.reference for sample in held.samples]
        return description | {"samples": refs, "partition": self._divided(plan, rule, held.samples)}

    def _divided(self, plan: StepPlanned, rule: Rule, samples: Sequence[Sample]) -> Partition:
        """Micro-batches of samples, by rank, as the training divided its own."""
        parallel, ranks = recorded_parallel(plan.environment.get("parallel") or {})
        work = self.policy.shape.work
        return divide_samples(samples, rule.algorithm, _schedule(plan), parallel.copies(ranks), work)


def _schedule(plan: StepPlanned) -> Json:
    """The settings that the step's micro-batches and learning rate follow from.

    Raises:
        ReplayError: they were not recorded.
    """
    if plan.schedule is None:
        raise ReplayError(
            f"step {plan.step}: the release that took it did not record how its samples were divided, so no "
            "other step can be made of them; it can be replayed as it is"
        )
    return plan.schedule


LANE = "rescore"
"""The lane that new rewards are written in."""


@dataclass(slots=True, eq=False)
class Rescoring:
    """Gives each trajectory a reward by a function, once.

    Attributes:
        name: `module:function`; source: of its rewards.
        rewards: trajectory -> what the function gave; None where it has no completion to give one for.
    """

    name: str
    source: str
    function: Callable[[Json], Any]
    rewards: dict[str, float | None] = field(default_factory=dict)

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the function's reward as the only one of its source.

        Raises:
            ConfigError: the function fails, or gives no finite number.
        """
        trajectory_id = trajectory.opened.trajectory_id
        if trajectory_id not in self.rewards:
            self.rewards[trajectory_id] = self._reward(trajectory)
        others = tuple(assigned for assigned in trajectory.rewards if assigned[1].source != self.source)
        if (reward := self.rewards[trajectory_id]) is None:
            return replace(trajectory, rewards=others)
        assigned = RewardAssigned(trajectory_id, None, reward, self.source)
        return replace(trajectory, rewards=(*others, ("", assigned)))

    def _reward(self, trajectory: Trajectory) -> float | None:
        rows = [as_json(path) for path in paths(trajectory)][-1:]
        if not rows:
            return None
        about = f"--rescore {self.name}: of trajectory {trajectory.opened.name}"
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what is shown
                value = self.function(rows[0])
        except Exception as error:  # the function's own code ran
            raise ConfigError(f"{about} it raised {error!r}: mend the function") from error
        try:
            reward = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise ConfigError(f"{about} it gave {value!r}: return a finite number")
        return reward


def rescoring(name: str, source: str | None) -> Rescoring:
    """The function of a name, `module:function`, which is imported here.

    Args:
        source: of its rewards; None: the function's own name.

    Raises:
        ConfigError: the name names no function.
        TrainError: it cannot be imported.
    """
    if not re.fullmatch(NAMED, name):
        raise ConfigError(f"--rescore {name!r} names no function: write module:function")
    function = load_part(name)
    if not callable(function):
        raise ConfigError(f"--rescore {name}: it is {type(function).__name__}, no function")
    return Rescoring(name, source or name.rpartition(":")[2], function)


@dataclass(frozen=True, slots=True)
class Written:
    """What was done to record rewards.

    Attributes:
        source: of the rewards.
        written: new ones; replaced: how many of these superseded another; already: those that were
            there.
    """

    source: str
    written: int
    replaced: int
    already: int


def write_rewards(log: Store, run: str, scorer: Rescoring, reserved: str, *, replaces: bool) -> Written:
    """Append the rewards of a function as events of its source, once: those that are there already stay.

    Args:
        run: the one that is asked about, in which the source is opened.
        reserved: the source that the run trained on, which a what-if leaves alone.
        replaces: whether a reward of the source with another value is superseded.

    Raises:
        ConfigError: the source is the reserved one, or has rewards with other values that are not to be
            replaced.
        LaneLockedError: another process writes rewards so.
    """
    if scorer.source == reserved:
        raise ConfigError(
            f"--source {scorer.source!r}: the step was trained on rewards of this source: name another, "
            "which the recipe.reward_source of a training then names"
        )
    rewards = {key: value for key, value in scorer.rewards.items() if value is not None}
    with log.claim(f"rescoring as {scorer.source!r}", "let it finish, or name another --source"):
        held = log.trajectories(None, set(rewards))
        there = {key: _in_force(trajectory, scorer.source) for key, trajectory in held.items()}
        odd = [key for key, current in there.items() if current is not None and current[1] != rewards[key]]
        if odd and not replaces:
            first = held[odd[0]].opened.name
            raise ConfigError(
                f"--source {scorer.source!r}: {len(odd)} trajectories have another reward of it, {first} "
                f"{_value_text(there[odd[0]])} and now {rewards[odd[0]]:g}: name another --source, or "
                "supersede them with --replace"
            )
        records = _records(held, rewards, there, scorer.source)
        if records:
            opened = RunOpened("what-if", _described(scorer))
            events = [Event(opened, run)]
            events += [Event(record, held[record.trajectory_id].run) for record in records]
            with log.writer(LANE) as writer:
                writer.append(events).result()
    return Written(scorer.source, len(records), len(odd), len(there) - len(records))


def _records(
    held: Mapping[str, Trajectory],
    rewards: Mapping[str, float],
    there: Mapping[str, tuple[str, float] | None],
    source: str,
) -> list[RewardAssigned]:
    """The rewards that are not in force yet."""
    records = []
    for key in held:
        current = there[key]
        if current is None or current[1] != rewards[key]:
            supersedes = None if current is None else current[0]
            records.append(RewardAssigned(key, None, rewards[key], source, supersedes))
    return records


def _in_force(trajectory: Trajectory, source: str) -> tuple[str, float] | None:
    """The event id and the value of a trajectory's reward of a source."""
    superseded = {reward.supersedes for _, reward in trajectory.rewards if reward.supersedes}
    matches = [
        (event_id, reward.reward)
        for event_id, reward in trajectory.rewards
        if (reward.source, reward.turn_id) == (source, None) and event_id not in superseded
    ]
    return matches[-1] if matches else None


def _value_text(reward: tuple[str, float] | None) -> str:
    return "none" if reward is None else f"{reward[1]:g}"


def _described(scorer: Rescoring) -> Json:
    """The origin of the rewards: the function, and the sha256 of the file that it is defined in."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(scorer.function))
    except TypeError:
        file = None
    digest = None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {"source": scorer.source, "function": scorer.name, "source_sha256": digest}
