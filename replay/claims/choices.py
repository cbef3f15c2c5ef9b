"""Makes the choices of a training again: which of the samples at hand each step had to take, and which
to drop.

A training's source of samples is followed from step to step by its own code, over the same log. At
a cut this decides everything. On the tail, the training's queue of groups is kept as it stood: the
log up to a plan's cut says which groups were complete, what the recipe makes of each, and how many
a step takes. Which of the waiting groups came first may have depended on clocks and on the order in
which lanes were read; it is taken as recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from rollbook.replay.attempts import (
    GIVEN,
    KINDS,
    Attempt,
    Dropped,
    DueDrop,
    Training,
    drops_of_skipped,
    first_of_step,
    in_arrival_order,
    retaken,
    trainings,
)
from rollbook.store import Store, parse_cut
from rollbook.store.cut import Cut
from rollbook.store.events import (
    Event,
    Json,
    RewardAssigned,
    SampleDropped,
    StepPlanned,
    TrajectoryAdopted,
    TrajectoryErased,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.fold.history import History, all_samples
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.config import AdmissionConfig
from rollbook.train.config.recipe import RecipeConfig, recorded_recipe
from rollbook.train.select.drops import dropped_members
from rollbook.train.select.groups import Standing
from rollbook.train.select.recipe import Candidate, ModelLimits, mixture_in
from rollbook.train.sources.backlog import Backlog
from rollbook.train.sources.queue_source import QueueSource

OF_AGENTS = frozenset(
    record.KIND
    for record in (
        *(TrajectoryOpened, TrajectoryAdopted, TrajectoryFinished, TrajectoryErased),
        *(TurnRequested, TurnCompleted, TurnFailed, TurnDelivered, RewardAssigned),
    )
)
ORDER_HUNG = "which groups came first hung on clocks or on several lanes, and is as recorded"
AHEAD = 256
"""Attempts that are followed to reach the one that is asked for; one further ahead is begun at anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a step has to take and to drop.

    Attributes:
        samples: as its manifest names them, in order.
        drops: each with its rule.
        others: dropped members of the samples' groups, each as a manifest describes it.
        groups: how many groups it takes together, and how many it took.
        open: what of it is taken as recorded, and not decided anew.
    """

    samples: list[Candidate]
    drops: list[DueDrop]
    others: list[Json]
    groups: tuple[int, int]
    open: str = ""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The part of a training's configuration that decides which samples its steps take."""

    run: str
    policy: str
    recipe: RecipeConfig
    algorithm: Algorithm
    admission: AdmissionConfig
    idle_timeout_s: float = 0.0


@dataclass(eq=False)
class Choices:
    """The choices of a run's trainings of a policy, each from the one before it.

    Attributes:
        limits: of the model.
    """

    log: Store
    history: History
    limits: ModelLimits
    _at: tuple[Training, int, _Followed] | None = None
    """The training that is followed, the place of its next attempt, and how it stands."""

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], tuple[Training, int]]:
        """(step, attempt) -> its training, and its place there."""
        events = self.log.events_of(KINDS)
        all_trainings = trainings(events, self.history.run, self.history.policy)
        return {
            (attempt.plan.step, attempt.plan.attempt): (training, place)
            for training in all_trainings
            for place, attempt in enumerate(training.attempts)
        }

    def attempt(self, plan: StepPlanned) -> Attempt | None:
        """The attempt of a manifest; None where nobody recorded its training."""
        entry = self._places.get((plan.step, plan.attempt))
        return None if entry is None else entry[0].attempts[entry[1]]

    def given(self, plan: StepPlanned) -> list[Dropped]:
        """What earlier attempts at a step, skipped in the same training, leave it to drop."""
        training, place = self._places[plan.step, plan.attempt]
        due: list[Dropped] = []
        first = first_of_step(training, place)
        for at in range(first, place):
            due += drops_of_skipped(training, at)
        return due

    def of(self, plan: StepPlanned) -> Choice | None:
        """The choice of an attempt that chose its samples, where each is used once; None where nobody
        recorded its training.

        Raises:
            CorruptionError: the log is damaged.
        """
        entry = self._places.get((plan.step, plan.attempt))
        if entry is None or entry[0].config.get("source") not in ("cut", "tail"):
            return None
        training, place = entry
        at = self._at
        if (
            at is None
            or at[0] is not training
            or not 0 <= place - at[1] < AHEAD
            or at[2].limits != self.limits
        ):
            first = first_of_step(training, place)
            before = self._before(training.attempts[first].plan.step)
            at = training, first, _Followed(self.log, training, first, before, self.limits)
        followed, choice = at[2], None
        for number in range(at[1], place + 1):
            choice = None if followed.lost else followed.attempt(number)
        self._at = None if followed.lost else (training, place + 1, followed)
        return choice

    def _before(self, step: int) -> History:
        """What had been trained and dropped before a step."""
        steps = {number: committed for number, committed in self.history.steps.items() if number < step}
        before = History(self.history.run, self.history.policy, steps)
        for committed in steps.values():
            attempt = self.attempt(committed.planned)
            for drop in () if attempt is None else (*attempt.earlier, *attempt.drops):
                before.dropped.add(drop.turn_id)
                before.dropped_of.add(drop.trajectory_id)
        return before


class _Followed:
    """A training's source of samples, followed through its attempts in order.

    Args:
        first: the place of the attempt to begin with.
        before: what had been trained and dropped by then.
    """

    def __init__(
        self, log: Store, training: Training, first: int, before: History, limits: ModelLimits
    ) -> None:
        self.limits = limits
        self.lost = False
        """Whether it is known no more how it stands."""
        self._log, self._training = log, training
        attempt = training.attempts[first]
        plan = attempt.plan
        self._settings = _Settings(
            before.run,
            plan.policy,
            recorded_recipe(plan.recipe),
            recorded_algorithm(plan.algorithm),
            AdmissionConfig(order=training.config.get("admission", {}).get("order", "windowed")),
        )
        self._tail = training.follows_tail
        stops = [plan.cut, *(drop.cut for drop in attempt.drops if drop.cut)] if self._tail else [plan.cut]
        self._cut: Cut = min(map(parse_cut, stops), key=lambda cut: sum(cut.values()))
        backlog = Backlog(log, self._cut, self._settings, before, mixture_in(limits))
        self._lanes = set(backlog.lanes)
        """That ended trajectories which wait."""
        self._source = FollowedQueue(
            self._settings,
            before,
            lambda: None,
            lambda: self._cut,
            backlog,
            live=self._tail,
            limits=limits,
        )
        self._settled: list[DueDrop] = []
        """What was dropped since the last step that was not skipped."""
        self._last: Choice | None = None

    def attempt(self, place: int) -> Choice | None:
        """The choice of the next attempt; None where none was made for it."""
        attempt, last = self._training.attempts[place], self._last
        batch = attempt.plan.rollout_batch
        again = retaken(self._training, place - 1) if place else None
        if batch is not None and "samples" not in batch:
            return None
        choice: Choice | None = None
        if attempt.number == 0 and (again is None or last is None):
            choice = self._chosen(attempt)
        elif last is not None:
            left = [sample for sample in last.samples if again is None or sample.leaf_turn_id in again]
            choice = replace(last, samples=left, drops=list(self._settled))
        self._last = choice
        self.lost = choice is None
        self._settled = [] if attempt.skipped_by is None or choice is None else choice.drops
        return choice

    def _chosen(self, attempt: Attempt) -> Choice | None:
        """Choose what an attempt has to take and to drop, and let go of both; None where several lanes ended
        more than a group takes, so that nobody knows which came first."""
        plan, due = attempt.plan, list(self._settled)
        settled = {drop.leaf_turn_id for drop in due}
        fresh = {d.turn_id: d for d in attempt.drops if d.rule not in GIVEN and d.turn_id not in settled}
        order = _recorded_order(plan, fresh.values())
        for (version, cut), turns in _turns_by_decision(fresh.values()).items():
            for group in self._standing(version, parse_cut(cut), order):
                if group.leaves & turns:
                    due += _due_drops(group, fresh)
                    self._source.let_go([group.name])
        taken: dict[str, int] = {ref["turn_id"]: at for at, ref in enumerate(all_samples(plan))}
        left, unfit = self._fit(plan, order, fresh)
        due += unfit
        there = {leaf for group in left for leaf in group.leaves}
        if self._tail and len(self._lanes) > 1 and not taken.keys() <= there:
            return None
        recorded = sorted(
            (group for group in left if group.leaves & (taken.keys() | fresh.keys())),
            key=lambda group: min(
                (taken[leaf] for leaf in group.leaves if leaf in taken), default=len(taken)
            ),
        )
        wanted, flat, hung = self._wanted(plan, left, recorded)
        due += flat
        samples = [sample for group in wanted for sample in group.kept]
        due += [ruled for group in wanted for ruled in _due_drops(group, fresh)]
        gone = {group.name for group in (*wanted, *recorded)}
        self._source.let_go(group.name for group in left if group.name in gone)
        count = self._settings.algorithm.demand.groups
        compares = self._settings.recipe.group_statistics == "all"
        others = dropped_members(samples, [d for g in wanted for d in g.drops]) if compares else []
        return Choice(samples, due, others, (count, len(recorded)), hung)

    def _standing(self, version: int, cut: Cut, order: Mapping[str, int]) -> list[Standing]:
        """The complete groups at a cut; where several lanes ended trajectories, each group's members in
        their recorded order."""
        events: list[Event] = []
        if self._tail and cut != self._cut:
            events = list(self._log.events_of(OF_AGENTS, cut, self._cut))
            run = self._settings.run
            ends = (e for e in events if e.run == run and isinstance(e.record, TrajectoryFinished))
            self._lanes.update(event.lane for event in ends)
            self._cut = cut
        groups = self._source.standing(events, version)
        if not self._tail or len(self._lanes) < 2:
            return groups
        for group in groups:
            by_record = sorted(
                group.trajectories, key=lambda trajectory_id: order.get(trajectory_id, len(order))
            )
            self._source.arrange(group.name, by_record)
        return self._source.standing([], version)

    def _fit(
        self, plan: StepPlanned, order: Mapping[str, int], fresh: Mapping[str, SampleDropped]
    ) -> tuple[list[Standing], list[DueDrop]]:
        """The groups that a step may take, and the drops of those of which the recipe keeps nothing."""
        left, due = list[Standing](), list[DueDrop]()
        for group in self._standing(plan.policy_version, parse_cut(plan.cut), order):
            recorded = bool(group.leaves & fresh.keys())
            if not group.unfit:
                left.append(group)
            elif recorded or not self._may_wait(group):
                due += _due_drops(group, fresh)
                self._source.let_go([group.name])
        return left, due

    def _may_wait(self, group: Standing) -> bool:
        """Whether a group of which nothing is kept may still be there: a reward may come, or it was erased
        after the step."""
        return group.lacks_reward or any(drop.sample.erased for drop in group.drops)

    def _wanted(
        self, plan: StepPlanned, left: Sequence[Standing], recorded: list[Standing]
    ) -> tuple[list[Standing], list[DueDrop], str]:
        """The groups that the step takes, in order; the drops of groups taken before them of which nothing
        was left; and what is taken as recorded."""
        named, flat = {group.name: group for group in left}, list[DueDrop]()
        hung = self._tail and self._hung(left)
        if hung:
            return recorded, [], ORDER_HUNG
        size, kept = self._settings.algorithm.demand.groups, [group for group in recorded if group.kept]
        while True:
            options = [[named[n] for n in names] for names in self._source.choices(plan.policy_version)]
            whole = [option for option in options if len(option) >= size] or options[:1]
            same = [option for option in whole if [g for g in option if g.kept] == kept]
            wanted = (same if self._tail and same else whole)[0]
            if not wanted or any(group.kept for group in wanted):
                return wanted, flat, ""
            flat += [ruled for group in wanted for ruled in _due_drops(group)]
            self._source.let_go(group.name for group in wanted)

    def _hung(self, left: Sequence[Standing]) -> bool:
        """Whether the order of groups depended on more than the log says."""
        ages = self._settings.recipe.max_staleness is not None or self._settings.admission.order != "windowed"
        return (
            len(self._lanes) > 1
            or self._training.config.get("mode") == "hybrid"
            or any(group.lacks_reward for group in left)
            or (ages and self._source.runs_unsampled)
        )


def _recorded_order(plan: StepPlanned, drops: Iterable[SampleDropped]) -> dict[str, int]:
    """Trajectory -> its place among those recorded. Of equal rewards the first counts, so what a comparing
    rule dropped came after what it left."""
    named = [ref["trajectory_id"] for ref in all_samples(plan)]
    named += [drop.trajectory_id for drop in in_arrival_order(drops)]
    return {trajectory_id: place for place, trajectory_id in enumerate(dict.fromkeys(named))}


def _turns_by_decision(drops: Iterable[SampleDropped]) -> dict[tuple[int, str], set[str]]:
    """(version, cut) by which drops were decided before a plan -> their leaf turns, in order of the cuts."""
    decisions: dict[tuple[int, str], set[str]] = {}
    for drop in drops:
        if drop.policy_version is not None and drop.cut is not None:
            decisions.setdefault((drop.policy_version, drop.cut), set()).add(drop.turn_id)
    return dict(sorted(decisions.items(), key=lambda item: sum(parse_cut(item[0][1]).values())))


def _due_drops(
    group: Standing, recorded: Mapping[str, SampleDropped] = MappingProxyType({})
) -> list[DueDrop]:
    """The drops of a group with their rules: the recorded rule where tokens were erased since."""
    due = [DueDrop.of(drop) for drop in group.drops]
    return [
        replace(ruled, rule=recorded[ruled.leaf_turn_id].rule)
        if ruled.detail is None and ruled.leaf_turn_id in recorded
        else ruled
        for ruled in due
    ]


class FollowedQueue(QueueSource):
    """The queue, driven by what was recorded: when it chose, and what it then let go of."""

    def standing(self, events: list[Event], version: int) -> list[Standing]:
        """Take in events, and see how the complete groups stand for a step, in the order in which they
        completed. Whoever follows a training then lets go of what it took."""
        if not self._begun:
            self._served = self._served_before = version
            self._take_backlog()
        self._take_in(events)
        return [
            Standing(
                group.name,
                group.trajectories,
                *self._fitting(group, version),
                unfit=self._unfit(group, version),
                lacks_reward=self._lacks_reward(group, version),
            )
            for group in self._complete_groups.values()
        ]

    def choices(self, version: int) -> tuple[list[str], list[str]]:
        """The groups that the next step takes, if it waits for those that run, and if it does not."""
        first, second = (self._chosen(version, waits=waits) for waits in (True, False))
        return [group.name for group in first], [group.name for group in second]

    def let_go(self, names: Iterable[str]) -> None:
        """Forget those of these groups that are still there."""
        for name in names:
            if (group := self._complete_groups.get(name)) is not None:
                self._remove(group)

    def arrange(self, name: str, trajectories: Sequence[str]) -> None:
        """Put a group's trajectories into another order."""
        group = replace(self._complete_groups[name], trajectories=tuple(trajectories))
        for trajectory_id in trajectories:
            self._by_trajectory[trajectory_id] = [
                group if other.name == name else other for other in self._by_trajectory[trajectory_id]
            ]
        self._complete_groups[name] = group
        self._fit.pop(name, None)

    @property
    def runs_unsampled(self) -> bool:
        """Whether a trajectory runs whose sampling version nobody knows yet."""
        return self._running.unsampled
