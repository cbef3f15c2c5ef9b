"""How a run goes, as one looks at it while it does: a fold of its log. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
from rollbook.store.fold import evaluated_agents
from rollbook.store.fold.evaluated_agents import EvaluatedAgents

KINDS = evaluated_agents.KINDS | frozenset(
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
class Course:
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
                self._planned[record.step] = {str(one["trajectory_id"]) for one in record.samples}
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
