"""The choices of a training, made again: what each step had to take of what was there, and to drop of it.

A training's source of samples is followed from step to step by its own code, over the same log. At a cut all
is decided by that. On the tail, the training's queue of groups is kept as it stood: the log up to a plan's
cut says which groups were complete, what the recipe makes of each, and how many a step takes. Which of the
waiting groups came first may have depended on clocks and on the order in which lanes were read, and is taken
as recorded.
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
    Ruled,
    Training,
    as_they_came,
    first_of_step,
    given_up,
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
    one.KIND
    for one in (
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
        others: members of the samples' groups that were dropped, of each what a manifest says.
        groups: how many it takes of what stands together, and how many it took.
        open: what of it is as recorded, and not decided anew.
    """

    samples: list[Candidate]
    drops: list[Ruled]
    others: list[Json]
    groups: tuple[int, int]
    open: str = ""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What of a training's configuration decides which samples its steps take."""

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
        """Step and attempt -> the training it is of, and its place there."""
        events = self.log.events_of(KINDS)
        made = trainings(events, self.history.run, self.history.policy)
        return {
            (attempt.plan.step, attempt.plan.attempt): (training, place)
            for training in made
            for place, attempt in enumerate(training.attempts)
        }

    def attempt(self, plan: StepPlanned) -> Attempt | None:
        """The attempt that a manifest is of; None where nobody recorded what training it is of."""
        found = self._places.get((plan.step, plan.attempt))
        return None if found is None else found[0].attempts[found[1]]

    def given(self, plan: StepPlanned) -> list[Dropped]:
        """What attempts before it in the same training, that were skipped, have it drop."""
        training, place = self._places[plan.step, plan.attempt]
        due: list[Dropped] = []
        first = first_of_step(training, place)
        for at in range(first, place):
            due += given_up(training, at)
        return due

    def of(self, plan: StepPlanned) -> Choice | None:
        """The choice of an attempt for which samples were chosen, of samples that are used once; None where
        nobody recorded what training it is of.

        Raises:
            CorruptionError: the log is damaged.
        """
        found = self._places.get((plan.step, plan.attempt))
        if found is None or found[0].config.get("source") not in ("cut", "tail"):
            return None
        training, place = found
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
        steps = {number: one for number, one in self.history.steps.items() if number < step}
        before = History(self.history.run, self.history.policy, steps)
        for one in steps.values():
            attempt = self.attempt(one.planned)
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
        self._settled: list[Ruled] = []
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
            left = [one for one in last.samples if again is None or one.leaf_turn_id in again]
            choice = replace(last, samples=left, drops=list(self._settled))
        self._last = choice
        self.lost = choice is None
        self._settled = [] if attempt.skipped_by is None or choice is None else choice.drops
        return choice

    def _chosen(self, attempt: Attempt) -> Choice | None:
        """What an attempt has to take and to drop, and let go of what it took and dropped; None where more
        ended in several lanes than a group takes, of whom nobody knows who came first."""
        plan, due = attempt.plan, list(self._settled)
        settled = {drop.leaf_turn_id for drop in due}
        fresh = {d.turn_id: d for d in attempt.drops if d.rule not in GIVEN and d.turn_id not in settled}
        order = _as_recorded(plan, fresh.values())
        for (version, cut), turns in _decided(fresh.values()).items():
            for group in self._standing(version, parse_cut(cut), order):
                if group.leaves & turns:
                    due += _ruled(group, fresh)
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
        due += [one for group in wanted for one in _ruled(group, fresh)]
        gone = {group.name for group in (*wanted, *recorded)}
        self._source.let_go(group.name for group in left if group.name in gone)
        count = self._settings.algorithm.demand.groups
        compares = self._settings.recipe.group_statistics == "all"
        others = dropped_members(samples, [d for g in wanted for d in g.drops]) if compares else []
        return Choice(samples, due, others, (count, len(recorded)), hung)

    def _standing(self, version: int, cut: Cut, order: Mapping[str, int]) -> list[Standing]:
        """The complete groups at a cut; where several lanes ended trajectories, the members of each in the
        order in which they were recorded."""
        events: list[Event] = []
        if self._tail and cut != self._cut:
            events = list(self._log.events_of(OF_AGENTS, cut, self._cut))
            run = self._settings.run
            ends = (e for e in events if e.run == run and isinstance(e.record, TrajectoryFinished))
            self._lanes.update(event.lane for event in ends)
            self._cut = cut
        found = self._source.standing(events, version)
        if not self._tail or len(self._lanes) < 2:
            return found
        for group in found:
            by_record = sorted(group.trajectories, key=lambda one: order.get(one, len(order)))
            self._source.arrange(group.name, by_record)
        return self._source.standing([], version)

    def _fit(
        self, plan: StepPlanned, order: Mapping[str, int], fresh: Mapping[str, SampleDropped]
    ) -> tuple[list[Standing], list[Ruled]]:
        """The groups that a step may take, and what is dropped since the recipe keeps nothing of it."""
        left, due = list[Standing](), list[Ruled]()
        for group in self._standing(plan.policy_version, parse_cut(plan.cut), order):
            told = bool(group.leaves & fresh.keys())
            if not group.unfit:
                left.append(group)
            elif told or not self._may_wait(group):
                due += _ruled(group, fresh)
                self._source.let_go([group.name])
        return left, due

    def _may_wait(self, group: Standing) -> bool:
        """Whether a group of which nothing is kept may be there still: a reward may come, or it was erased
        after the step."""
        return group.lacks_reward or any(drop.sample.erased for drop in group.drops)

    def _wanted(
        self, plan: StepPlanned, left: Sequence[Standing], recorded: list[Standing]
    ) -> tuple[list[Standing], list[Ruled], str]:
        """The groups that the step takes, in order; what is dropped of groups that were taken before, of
        which nothing was left; and what of it is as recorded."""
        named, flat = {group.name: group for group in left}, list[Ruled]()
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
            flat += [one for group in wanted for one in _ruled(group)]
            self._source.let_go(group.name for group in wanted)

    def _hung(self, left: Sequence[Standing]) -> bool:
        """Whether the order of groups hung on more than the log says."""
        ages = self._settings.recipe.max_staleness is not None or self._settings.admission.order != "windowed"
        return (
            len(self._lanes) > 1
            or self._training.config.get("mode") == "hybrid"
            or any(group.lacks_reward for group in left)
            or (ages and self._source.runs_unsampled)
        )


def _as_recorded(plan: StepPlanned, drops: Iterable[SampleDropped]) -> dict[str, int]:
    """Trajectory -> its place among those recorded: of equal rewards the first counts, so what a rule
    that compares them dropped came behind what it left."""
    named = [ref["trajectory_id"] for ref in all_samples(plan)]
    named += [drop.trajectory_id for drop in as_they_came(drops)]
    return {one: place for place, one in enumerate(dict.fromkeys(named))}


def _decided(drops: Iterable[SampleDropped]) -> dict[tuple[int, str], set[str]]:
    """The version and the cut by which drops were decided before a plan -> their leaf turns, in order."""
    found: dict[tuple[int, str], set[str]] = {}
    for drop in drops:
        if drop.policy_version is not None and drop.cut is not None:
            found.setdefault((drop.policy_version, drop.cut), set()).add(drop.turn_id)
    return dict(sorted(found.items(), key=lambda one: sum(parse_cut(one[0][1]).values())))


def _ruled(group: Standing, recorded: Mapping[str, SampleDropped] = MappingProxyType({})) -> list[Ruled]:
    """What is dropped of a group, by which rules; by the recorded one where tokens were erased since."""
    due = [Ruled.of(drop) for drop in group.drops]
    return [
        replace(one, rule=recorded[one.leaf_turn_id].rule)
        if one.detail is None and one.leaf_turn_id in recorded
        else one
        for one in due
    ]


class FollowedQueue(QueueSource):
    """The queue, to which is told what was recorded: when it chose, and what it then let go of."""

    def standing(self, events: list[Event], version: int) -> list[Standing]:
        """Take in events, and see how the complete groups stand for a step, in the order in which they
        completed: for who follows a training, and lets go of what it took."""
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
        """Keep nothing of some groups, of those that are there."""
        for name in names:
            if (group := self._complete_groups.get(name)) is not None:
                self._remove(group)

    def arrange(self, name: str, trajectories: Sequence[str]) -> None:
        """Put a group's trajectories into another order."""
        group = replace(self._complete_groups[name], trajectories=tuple(trajectories))
        for trajectory_id in trajectories:
            self._of[trajectory_id] = [group if one.name == name else one for one in self._of[trajectory_id]]
        self._complete_groups[name] = group
        self._fit.pop(name, None)

    @property
    def runs_unsampled(self) -> bool:
        """Whether a trajectory runs of which nobody knows yet what version samples it."""
        return self._running.unsampled
