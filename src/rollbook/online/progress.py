"""The progress of a run, for whoever watches it: a fold of its log. Pure.

It also puts into text what a run waits for, from its state (parts, an evaluation, groups, a step,
room), and decides when to print that.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollbook.online.parts import LINGER_S
from rollbook.store.events import (
    VOID,
    EvalFinished,
    EvalStarted,
    Event,
    Json,
    LaunchEnded,
    LaunchStarted,
    RewardAssigned,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepFailed,
    StepPlanned,
    SyncFinished,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.fold.history import EVALUATION_KINDS, EvaluatedAgents
from rollbook.store.patience import SAY_AFTER_S, SAY_AGAIN_S, Patience, waits

KINDS = EVALUATION_KINDS | frozenset(
    record.KIND
    for record in (
        *(RunOpened, StepPlanned, StepCommitted, StepFailed, SyncFinished, EvalStarted, EvalFinished),
        *(LaunchStarted, LaunchEnded, TrajectoryOpened, TrajectoryFinished, RewardAssigned, SampleDropped),
    )
)
RECENT = 200
"""Of so many rewards, the latest, the mean is shown."""
OLDEST_KEPT = 100_000
"""Trajectories that nothing was heard of for so many others are forgotten."""


@dataclass(slots=True)
class RunProgress:
    """What is known of a run since somebody looks.

    Attributes:
        steps, done: optimizer steps of the training in all, and those that are committed.
        version: of the policy: that of the last step, or that which engines hold.
        metrics: of the last step; evaluation: of the last evaluation, with its `policy_version`; partial:
            what is said of it if it is not whole.
        evaluating: the version that agents are being evaluated at; None: none. agents: those.
        changed: when the training last began, took a step or began or ended an evaluation, in seconds since
            1970; None: it did not. opened: when it last began; planned: when the step began that is being
            taken; None: none is.
        launched: agents that run.
        ended: launches that ended, by status.
        rewards: the latest, of trajectories.
    """

    steps: int | None = None
    done: int = 0
    version: int = 0
    metrics: Json = field(default_factory=dict)
    evaluation: Json = field(default_factory=dict)
    partial: str | None = None
    evaluating: int | None = None
    agents: EvaluatedAgents = field(default_factory=EvaluatedAgents)
    changed: float | None = None
    opened: float | None = None
    planned: float | None = None
    launched: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _group_of: dict[str, str] = field(default_factory=dict)
    """Trajectory of split train -> its group, or its own id; until it is used, dropped or void."""
    _running: Counter[str] = field(default_factory=Counter)
    """Group -> its trajectories that are not finished."""
    _planned: dict[int, set[str]] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[int, int]:
        """Groups in which something runs, and groups that wait to be trained on."""
        there = set(self._group_of.values())
        running = {group for group in there if self._running[group] > 0}
        return len(running), len(there) - len(running)

    @property
    def reward(self) -> float | None:
        """The mean of the latest rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def take(self, events: Iterable[Event]) -> None:
        """Fold events, each lane in order."""
        for event in events:
            self.agents.take(event.record)
            self._note_change(event)
            match event.record:
                case RunOpened(command="train") as record:
                    self.steps, self.done = record.config["steps"], record.config["steps_done"]
                    self.opened, self.planned, self.evaluating = event.time_us / 1e6, None, None
                case TrajectoryOpened(split="train") as record:
                    self._opened(record.trajectory_id, record.group or record.trajectory_id)
                case TrajectoryFinished() as record if record.trajectory_id in self._group_of:
                    self._running[self._group_of[record.trajectory_id]] -= 1
                    if record.status == VOID:
                        self._forget([record.trajectory_id])
                case SampleDropped() as record:
                    self._forget([record.trajectory_id])
                case RewardAssigned(turn_id=None, source="agent") as record:
                    if record.trajectory_id in self._group_of:
                        self.rewards.append(record.reward)
                case LaunchStarted() | LaunchEnded() as record:
                    self._launch(record)
                case record:
                    self._trained(record)

    def _note_change(self, event: Event) -> None:
        match event.record:
            case RunOpened(command="train") | StepCommitted() | EvalStarted() | EvalFinished():
                self.changed, self.planned = event.time_us / 1e6, None
            case StepPlanned():
                self.planned = event.time_us / 1e6
            case StepFailed():
                self.planned = None

    def _launch(self, record: LaunchStarted | LaunchEnded) -> None:
        if isinstance(record, LaunchStarted):
            self.launched += 1
            return
        self.launched = max(self.launched - 1, 0)
        self.ended[record.status] += 1

    def _trained(self, record: object) -> None:
        match record:
            case StepPlanned():
                self._planned[record.step] = {str(sample["trajectory_id"]) for sample in record.samples}
            case StepCommitted():
                self.done, self.version = self.done + 1, record.policy_version
                self.metrics = record.metrics
                self._forget(self._planned.pop(record.step, set()))
            case SyncFinished():
                self.version = max(self.version, record.policy_version)
            case EvalStarted():
                self.evaluating = record.policy_version
            case EvalFinished():
                self.evaluating = None
                self.evaluation = record.metrics | {"policy_version": record.policy_version}
                self.partial = record.partial

    def _opened(self, trajectory_id: str, group: str) -> None:
        self._group_of[trajectory_id] = group
        self._running[group] += 1
        while len(self._group_of) > OLDEST_KEPT:
            self._forget([next(iter(self._group_of))])

    def _forget(self, trajectories: Iterable[str]) -> None:
        for trajectory_id in trajectories:
            group = self._group_of.pop(trajectory_id, None)
            if group is not None and self._running[group] <= 0:
                del self._running[group]


QUIET_S = (SAY_AFTER_S, 20.0, 30.0, SAY_AGAIN_S)
"""Pauses between what is said in a silence: it is broken after 10 s, 30 s and 60 s, and then each minute."""


@dataclass(frozen=True, slots=True)
class PartState:
    """A part, as far as it may be waited for.

    Attributes:
        since: when it came to this state, in seconds since 1970.
        ready_s: the longest time until it is ready, and stop_s until it has ended, once it is asked to.
        log: what it prints is there.
    """

    name: str
    state: str
    since: float
    ready_s: float
    stop_s: float
    log: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the training: groups of a step, and for how long it waits for one, and for an evaluation."""

    groups: int
    idle_s: float
    evaluation_s: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """One thing that is waited for.

    Attributes:
        key: the same while it is the same wait.
        since: when the wait began; until: when it ends at the latest (None: never); seconds since 1970.
        work: it is what the run is for: a line each minute is enough, however often it begins anew.
    """

    key: str
    what: str
    since: float
    until: float | None
    work: bool = False

    def in_words(self, now: float) -> str:
        """In a line."""
        return waits(self.what, now - self.since, None if self.until is None else self.until - now, now)


def awaited(
    course: RunProgress, parts: Sequence[PartState], limits: Limits | None, held: int, now: float
) -> list[Awaited]:
    """All that a run waits for now.

    Args:
        limits: None where nothing is trained.
        held: trajectories that admission holds.
    """
    pending = [_part(part) for part in parts if part.state in ("starting", "starting again", "stopping")]
    by_name = {part.name: part for part in parts}
    trainer, rollouts = by_name.get("trainer"), by_name.get("rollouts")
    if limits is not None and trainer is not None and trainer.state == "running":
        pending += _training(course, trainer, limits)
    elif rollouts is not None and rollouts.state == "running" and not pending:
        pending.append(_rollouts(course, rollouts, trainer))
    if held:
        pending.append(
            Awaited(
                "admission",
                f"room for {held} new trajectories, which admission holds until the trainer has made "
                f"version {course.version + 1} or a later one",
                course.changed or now,
                None,
            )
        )
    return pending


def _part(part: PartState) -> Awaited:
    what = f"{part.name}, which is {part.state}; {part.log} says what it does"
    limit_s = part.stop_s if part.state == "stopping" else part.ready_s
    return Awaited(f"part {part.name}", what, part.since, part.since + limit_s)


def _training(course: RunProgress, trainer: PartState, limits: Limits) -> list[Awaited]:
    where = f"; {trainer.log} says what it does"
    if course.steps is None or course.changed is None or (course.opened or 0.0) < trainer.since:
        what = f"the trainer to read its model and the log{where}"
        return [Awaited("trainer", what, trainer.since, None)]
    if course.evaluating is not None:
        what = f"agents to be evaluated at version {course.evaluating}: {course.agents.in_words}"
        until = course.changed + limits.evaluation_s
        return [Awaited(f"evaluation {course.evaluating}", what, course.changed, until)]
    if course.planned is not None:
        what = f"the trainer to take step {course.done + 1} of {course.steps}{where}"
        return [Awaited("step", what, course.planned, None, work=True)]
    if course.done >= course.steps:
        what = f"the trainer to end, after step {course.done} of {course.steps}{where}"
        return [Awaited("trainer's end", what, course.changed, None)]
    running, whole = course.groups
    if whole >= limits.groups:
        what = f"the trainer to plan step {course.done + 1} of {course.steps}: {whole} groups are there"
        return [Awaited("plan", what, course.changed, None, work=True)]
    what = f"groups for step {course.done + 1} of {course.steps}: {whole} of {limits.groups} are there"
    what += f", {running} run" if running else ", none runs"
    return [Awaited(f"step {course.done}", what, course.changed, course.changed + limits.idle_s)]


def _rollouts(course: RunProgress, rollouts: PartState, trainer: PartState | None) -> Awaited:
    """Rollouts without a training, or after it."""
    what = f"the rollouts to end: {course.launched} run, {sum(course.ended.values())} ended"
    if trainer is None or trainer.state != "ended":
        return Awaited("rollouts", what, rollouts.since, None, work=True)
    return Awaited("rollouts' end", what, trainer.since, trainer.since + LINGER_S)


@dataclass(slots=True)
class Silence:
    """What breaks the silence of a console: each wait after 10 s, and again each minute; and all of them
    where no other line is printed for long. Work is said each minute at most.

    Attributes:
        heard: when another line was printed, in seconds since 1970.
    """

    heard: float
    _patience: dict[str, Patience] = field(default_factory=dict)
    _work: float = -math.inf
    """When a wait for work was said last."""
    _quiet: list[float] = field(default_factory=list)
    """When waits were said since another line was printed."""

    def hear(self, now: float) -> None:
        """Another line is printed."""
        self.heard = now
        self._quiet.clear()

    def due(self, pending: Sequence[Awaited], now: float) -> list[Awaited]:
        """Those that are to be said now, which then count as said."""
        known, self._patience = self._patience, {}
        for wait in pending:
            self._patience[wait.key] = known.get(wait.key, Patience(wait.since))
        due = [wait for wait in pending if self._patience[wait.key].due(now)]
        pause = QUIET_S[min(len(self._quiet), len(QUIET_S) - 1)]
        if now - (self._quiet[-1] if self._quiet else self.heard) >= pause:
            due = list(pending)
        due = [wait for wait in due if not wait.work or now - self._work >= SAY_AGAIN_S]
        for wait in due:
            self._patience[wait.key].reported = now
            self._work = now if wait.work else self._work
        if due:
            self._quiet.append(now)
        return due
