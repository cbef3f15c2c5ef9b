"""A fold over a run's log: the prompt groups that were admitted and are neither used nor dropped.
Pure.

The same log also says which online training is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rollbook.store.events import (
    VOID,
    Event,
    Json,
    Record,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
)
from rollbook.store.fold.staleness import StalenessPolicy
from rollbook.store.fold.standings import Drop, Plan

KINDS = frozenset(
    kind.KIND
    for kind in (
        RunOpened,
        SampleDropped,
        StepCommitted,
        StepPlanned,
        TrajectoryAdopted,
        TrajectoryFinished,
        TrajectoryOpened,
        TurnCompleted,
        TurnDelivered,
    )
)
"""Kinds of events that the fold is about."""
TRAINABLE = frozenset({"train", "teacher"})
"""Splits that a training may name."""
LOOSE_KEPT = 32_768
"""How many finished trajectories are kept that no training counts yet, the latest: more than any training
admits ahead. With so many waiting there is no room whatever came earlier."""


@dataclass(slots=True)
class _Trajectory:
    """What the fold keeps of a trajectory that is not used yet."""

    group: str | None = None
    split: str | None = None
    """None: it was adopted, and the lane that holds its beginning is read later."""
    running: bool = True
    given_up: bool = False
    """Whether it was aborted: then no more of its group will begin."""
    sampled: set[str] | None = None
    """Turns that may be trained once they are delivered."""
    productive: bool = False
    oldest: dict[str, int] | None = None
    """Policy -> version of the oldest token that it sampled."""
    void: bool = False
    """Whether it ended as `void`, before its beginning was read."""


@dataclass(slots=True)
class _PromptGroup:
    """Trajectories that count together.

    Attributes:
        name: the group's; None: one trajectory, in no group.
        spent: it was used, and is kept only for the members that are still to be read.
    """

    name: str | None
    members: set[str] = field(default_factory=set)
    spent: bool = False


@dataclass(slots=True)
class Outstanding:
    """The fold, of one run. Events of one trajectory come in order, lanes one after the other in any."""

    run: str
    training: OnlineTraining | None = None
    _versions: dict[str, int] = field(default_factory=dict)
    """Policy -> its trainer's version."""
    _trajectories: dict[str, _Trajectory] = field(default_factory=dict)
    _groups: dict[str, _PromptGroup] = field(default_factory=dict)
    """Only while there is a training, which decides how trajectories are grouped."""
    _group_of: dict[str, str] = field(default_factory=dict)
    _latest: dict[str, str] = field(default_factory=dict)
    """Group -> its prompt group that was admitted last: a name may be used again once a group is whole."""
    _loose: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Finished trajectories in no prompt group, those that finished first at the front."""
    _made: int = 0
    """How many trajectories were counted into prompt groups."""
    _spent: int = 0
    _planned: dict[str, tuple[int, int, Sequence[str]]] = field(default_factory=dict)
    """Policy -> step, attempt and trajectories of the step that runs."""
    _closed: set[str] = field(default_factory=set)
    """Trajectories that were used or dropped before this fold saw them begin: lanes are read one by one."""

    @property
    def count(self) -> int:
        """How many prompt groups are outstanding."""
        return len(self._groups) - self._spent

    @property
    def stalled(self) -> bool:
        """Whether no more will come by itself: no group and no step runs, and too few are whole."""
        training, whole = self.training, 0
        if training is None or training.name in self._planned:
            return False
        for prompt_group in self._groups.values():
            if prompt_group.spent:
                continue
            if any(self._trajectories[member].running for member in prompt_group.members):
                return False
            whole += len(prompt_group.members) >= self._size
        return whole < training.policy.batch

    @property
    def version(self) -> int:
        """The trainer's."""
        return 0 if self.training is None else self._versions.get(self.training.name, 0)

    @property
    def state(self) -> tuple[object, ...]:
        """Changes whenever more may begin than before, and whenever something begins."""
        return self._made, self.count, self.version, self.training

    def room(self, group: str | None) -> int:
        """How many more trajectories of this name belong to its prompt group that was admitted last."""
        prompt_group = None if group is None else self._groups.get(self._latest.get(group, ""))
        return 0 if prompt_group is None else max(self._size - len(prompt_group.members), 0)

    def add_all(self, events: Iterable[Event | Plan | Drop]) -> None:
        """Fold events up to a closed cut: nothing that they name is still to come."""
        for event in events:
            self.add(event)
        self._closed.clear()

    def add(self, event: Event | Plan | Drop) -> None:
        """Fold an event, or what one of the run says of samples."""
        match event:
            case Plan():
                self._plan(event.policy, event.policy_version, event.step, event.attempt, event.trajectories)
            case Drop():
                self._use([event.trajectory_id])
            case Event() if event.run == self.run:
                self._add(event.record)

    def _add(self, record: Record) -> None:
        match record:
            case TurnCompleted() | TurnDelivered():
                self._turn(record)
            case TrajectoryOpened() if record.split in TRAINABLE:
                self._open(record)
            case TrajectoryAdopted():
                if record.trajectory_id not in self._closed:
                    self._trajectories.setdefault(record.trajectory_id, _Trajectory())
            case TrajectoryFinished():
                self._finish(record)
            case SampleDropped():
                self._use([record.trajectory_id])
            case StepPlanned():
                named = [str(sample["trajectory_id"]) for sample in record.samples]
                self._plan(record.policy, record.policy_version, record.step, record.attempt, named)
            case StepCommitted():
                self._committed(record)
            case RunOpened(command="train"):
                self._run_opened(record)

    # Trajectories -----------------------------------------------------------------------------

    def restore(
        self,
        trajectory_id: str,
        group: str | None,
        split: str,
        *,
        running: bool,
        given_up: bool,
        productive: bool,
        oldest: dict[str, int] | None,
        sampled: Iterable[str],
    ) -> None:
        """Take the state that a trajectory's events led to, in place of the events themselves.

        It comes before any event of another trajectory. Trajectories come in the order in which they were
        opened; `finished_before` then gives the order in which they finished.

        Args:
            sampled: turns that may be trained once they are delivered.
        """
        waiting = set(sampled) if running else None
        self._trajectories[trajectory_id] = _Trajectory(
            group, split, running, given_up, waiting, productive, oldest
        )

    def finished_before(self, trajectories: Iterable[str]) -> None:
        """Take the order in which the restored trajectories had finished."""
        self._loosen(trajectories)

    def _open(self, opened: TrajectoryOpened) -> None:
        known = self._trajectories.setdefault(opened.trajectory_id, _Trajectory())
        if known.void:
            del self._trajectories[opened.trajectory_id]
            return
        known.group, known.split = opened.group, opened.split
        self._assign(opened.trajectory_id, known)
        self._remove_if_over(self._group_of.get(opened.trajectory_id))

    def _turn(self, record: TurnCompleted | TurnDelivered) -> None:
        known = self._trajectories.get(record.trajectory_id)
        if known is None:
            return
        if isinstance(record, TurnDelivered):
            known.productive = known.productive or record.turn_id in (known.sampled or ())
        elif record.version_spans and not record.logprob_semantics.get("altered"):
            known.sampled = known.sampled or set()
            known.sampled.add(record.turn_id)
            known.oldest = known.oldest or {}
            for span in record.version_spans:
                before = known.oldest.get(span.policy, span.version)
                known.oldest[span.policy] = min(before, span.version)

    def _finish(self, record: TrajectoryFinished) -> None:
        known = self._trajectories.get(record.trajectory_id)
        if known is None:
            return
        if record.status == VOID:
            if known.split is None:
                known.void = True
            else:
                self.withdraw(record.trajectory_id)
            return
        known.running = False
        known.sampled = None
        known.given_up = record.status == "aborted"
        self._remove_if_over(self._group_of.get(record.trajectory_id))
        self._loosen([record.trajectory_id])

    def _loosen(self, trajectories: Iterable[str]) -> None:
        """Keep the latest finished trajectories that are in no prompt group."""
        for trajectory_id in trajectories:
            known = self._trajectories.get(trajectory_id)
            if known is not None and not known.running and trajectory_id not in self._group_of:
                self._loose[trajectory_id] = None
        while len(self._loose) > LOOSE_KEPT:
            oldest, _ = self._loose.popitem(last=False)
            del self._trajectories[oldest]

    def withdraw(self, trajectory_id: str) -> None:
        """A trajectory did not begin after all: its opening is not in the log."""
        self._trajectories.pop(trajectory_id, None)
        name = self._group_of.pop(trajectory_id, None)
        if name is not None:
            prompt_group = self._groups[name]
            prompt_group.members.discard(trajectory_id)
            if prompt_group.members:
                self._remove_if_over(name)
            else:
                self._remove(name)

    def _use(self, trajectories: Iterable[str]) -> None:
        for trajectory_id in trajectories:
            name = self._group_of.get(trajectory_id)
            if name is not None:
                self._remove(name)
            elif self._trajectories.pop(trajectory_id, None) is None:
                self._closed.add(trajectory_id)
            self._loose.pop(trajectory_id, None)

    # The training -----------------------------------------------------------------------------

    def _run_opened(self, record: RunOpened) -> None:
        training = training_of(record)
        other = self.training is not None and record.config.get("policy") != self.training.name
        if training is None and other:
            return  # a training of another policy
        self.training = training
        self._regroup()

    def _regroup(self) -> None:
        """Regroup what is there, as another training counts it."""
        self._groups, self._group_of, self._latest, self._spent = {}, {}, {}, 0
        self._loose = OrderedDict()
        for trajectory_id, known in self._trajectories.items():
            if known.split is not None:
                self._assign(trajectory_id, known)
        for name in list(self._groups):
            self._remove_if_over(name)
        self._loosen(list(self._trajectories))

    def _plan(self, policy: str, version: int, step: int, attempt: int, named: Sequence[str]) -> None:
        self._versions[policy] = version
        self._planned[policy] = (step, attempt, named)

    def _committed(self, record: StepCommitted) -> None:
        self._versions[record.policy] = record.policy_version
        step, attempt, used = self._planned.pop(record.policy, (-1, -1, []))
        training = self.training
        if training is not None and record.policy != training.name:
            return
        if (step, attempt) == (record.step, record.attempt):
            self._use(used)
        if training is None:
            return
        if training.steps_left > 1:
            self.training = replace(training, steps_left=training.steps_left - 1)
            for name, prompt_group in list(self._groups.items()):
                if len(prompt_group.members) < self._size:  # no age makes a whole one over
                    self._remove_if_over(name)
        else:
            self.training = None
            self._regroup()

    # Prompt groups ----------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return 1 if self.training is None else self.training.group_size

    def _assign(self, trajectory_id: str, known: _Trajectory) -> None:
        """Count a trajectory into its prompt group."""
        if self.training is None or known.split is None or not self.training.uses(known.split, known.group):
            return
        group = known.group if self._size > 1 else None
        self._made += 1
        if self.room(group):
            name = self._latest[group or ""]
        else:
            name = f"{self._made}"
            self._groups[name] = _PromptGroup(group)
            if group is not None:
                self._latest[group] = name
        prompt_group = self._groups[name]
        prompt_group.members.add(trajectory_id)
        self._group_of[trajectory_id] = name
        if trajectory_id in self._closed and not prompt_group.spent:
            prompt_group.spent = True
            self._spent += 1

    def _remove_if_over(self, name: str | None) -> None:
        """Drop a prompt group that will never be used: it ended, and nothing in it can be trained.

        One that lacks trajectories may still get them; not so, where none of it runs, one that was given up,
        or of which nothing is young enough by now.
        """
        prompt_group = None if name is None else self._groups.get(name)
        if name is None or prompt_group is None:
            return
        members = [self._trajectories[member] for member in prompt_group.members]
        whole = len(members) >= self._size
        if prompt_group.spent or any(member.running for member in members):
            over = prompt_group.spent and whole
        elif whole:
            over = not any(member.productive for member in members)
        else:
            young = any(member.productive and not self._too_old(member) for member in members)
            over = not young or any(member.given_up for member in members)
        if over:
            self._remove(name)

    def _too_old(self, known: _Trajectory) -> bool:
        if self.training is None or (limit := self.training.policy.max_staleness) is None:
            return False
        oldest = (known.oldest or {}).get(self.training.name)
        return oldest is not None and self.version - oldest > limit

    def _remove(self, name: str) -> None:
        prompt_group = self._groups.pop(name)
        self._spent -= prompt_group.spent
        if prompt_group.name is not None and self._latest.get(prompt_group.name) == name:
            del self._latest[prompt_group.name]
        for trajectory_id in prompt_group.members:
            self._trajectories.pop(trajectory_id, None)
            self._group_of.pop(trajectory_id, None)
            self._closed.discard(trajectory_id)


def used_by(run: str, trainers: Iterable[Event | Plan | Drop]) -> set[str]:
    """The trajectories that a run's trainers used or dropped, by all that they wrote."""
    fold = Outstanding(run)
    for event in trainers:
        fold.add(event)
    return fold._closed


@dataclass(frozen=True, slots=True)
class OnlineTraining:
    """An online training that the log says is under way.

    Attributes:
        policy: what it may use, and when.
        name: the line of weights that it trains.
        group_size: trajectories in a group, 1 where there are none.
        splits: it uses trajectories of these.
        steps_left: optimizer steps until it ends.
    """

    policy: StalenessPolicy
    name: str
    group_size: int
    splits: frozenset[str]
    steps_left: int

    def uses(self, split: str, group: str | None) -> bool:
        """Whether it may use such a trajectory: where groups are compared, one in none is of no use."""
        return split in self.splits and (self.group_size == 1 or group is not None)


def training_of(opened: RunOpened) -> OnlineTraining | None:
    """The training that a `run.opened` says begins: on the log's tail, staleness bounded, steps left."""
    config = opened.config
    if opened.command != "train" or config.get("source") != "tail":
        return None
    try:
        recipe, (groups, size, steps) = config["recipe"], _demand(config)
        policy = StalenessPolicy(groups, recipe["max_staleness"], config["admission"]["order"], steps)
        left = config["steps"] - config["steps_done"]
        admitted = config["admission"]["hold"] and recipe["max_staleness"] is not None
        splits = frozenset(recipe["splits"])
        return OnlineTraining(policy, config["policy"], size, splits, left) if admitted and left > 0 else None
    except (KeyError, TypeError):
        return None  # a release before this one's, which held nothing back


def _demand(config: Json) -> tuple[int, int, int]:
    """Groups of a rollout batch, trajectories in each (1 where each stands alone), and steps taken on it."""
    if "demand" in config:
        demand = config["demand"]
        steps = demand.get("epochs", 1) * demand.get("mini_batches", 1)
        return demand["groups"], demand["group_size"], steps
    # Recorded before runs said so, when there were these two algorithms.
    algorithm = config["algorithm"]
    if "groups" in algorithm:
        return algorithm["groups"], algorithm["group_size"], 1
    return algorithm["batch_size"], 1, 1
