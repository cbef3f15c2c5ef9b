"""The token ledger as a fold of events: an independent implementation to compare with SQL. Pure.

Per run and policy version, at any cut,

    generated = trained + dropped (by rule) + waiting + in flight + kept out (by reason)

in tokens of completed turns. It decides as the trainer does: a turn belongs to the sample of the
first leaf above it in turn order, and is decided with that sample by each committed attempt that
consumed or dropped it and was not abandoned since, if it had been delivered by the cut of the
attempt's plan (before that it was masked). Trajectories that a training of groups had to decide on,
and did not, are a part of the ledger. Tests and benchmarks compare the SQL view `ledger` with it;
the two share no code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollbook.store.cut import Cut, holds, parse_cut
from rollbook.store.events import (
    VOID,
    Event,
    Json,
    RunOpened,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepPlanned,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
)
from rollbook.store.events.erased import TOKENS_ERASED
from rollbook.store.fold.ownership import OwnershipChain, Position
from rollbook.store.sql.balance import TERMS

__all__ = ["fold_ledger"]

Training = tuple[str, str, int]
"""Run, policy, and how many trajectories make up a group."""


@dataclass(frozen=True, slots=True)
class DecidedSample:
    """A sample that a training of groups decided on, and the cut at which it did."""

    training: Training
    trajectory_id: str
    leaf: str
    cut: Cut


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory, and what was decided on of it.

    Attributes:
        group: its run, and its name; None where it is not known, or has none.
        finished: where it ended, unless as void.
        waits: whether it may be used, and nobody has used it.
        of_use: whether there was something to train on by a cut.
    """

    trajectory_id: str
    group: tuple[str, str] | None
    finished: Position | None
    waits: bool
    taken: list[DecidedSample]
    of_use: Callable[[Cut], bool]


@dataclass(slots=True)
class Openings:
    """The trainings that lanes began, up to an event, and the training of each attempt."""

    _last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _plans: dict[tuple[str, str, int, int], tuple[str, int, int]] = field(default_factory=dict)

    def open(self, lane: str, seq: int, run: str, record: RunOpened) -> None:
        """A process begins to write."""
        self._last[lane, run] = seq, int((record.config.get("demand") or {}).get("group_size", 1))

    def plan(self, lane: str, run: str, record: StepPlanned) -> None:
        """The process plans an attempt."""
        key = run, record.policy, record.step, record.attempt
        self._plans[key] = (lane, *self._last.get((lane, run), (0, 1)))

    def consumed(self, run: str, plan: StepPlanned) -> Iterator[DecidedSample]:
        """What a committed attempt took, with what its rollout batch has for later ones."""
        training = self._training(run, plan)
        samples: list[Json] = (
            plan.samples if plan.rollout_batch is None else plan.rollout_batch.get("samples", [])
        )
        for ref in samples if training else ():
            assert training is not None
            yield DecidedSample(training, ref["trajectory_id"], ref["turn_id"], parse_cut(plan.cut))

    def dropped(
        self, run: str, plan: StepPlanned, lane: str, seq: int, drop: SampleDropped
    ) -> Iterator[DecidedSample]:
        """A drop that was recorded with an attempt, since its training began."""
        training = self._training(run, plan)
        own_lane, since, _ = self._plans[run, plan.policy, plan.step, plan.attempt]
        if training is not None and own_lane == lane and seq > since:
            unknown = drop.rule in ("not_finite", "all_rejected")  # of a step that was skipped
            cut = {} if unknown else parse_cut(drop.cut or plan.cut)
            yield DecidedSample(training, drop.trajectory_id, drop.turn_id, cut)

    def _training(self, run: str, plan: StepPlanned) -> Training | None:
        """The training of an attempt, if samples of groups were chosen for it, to be used once."""
        size = self._plans[run, plan.policy, plan.step, plan.attempt][2]
        once = plan.schedule is not None and plan.schedule.get("slice") is None
        chosen = plan.rollout_batch is None or "samples" in plan.rollout_batch
        fits = size > 1 and once and chosen and "train" in plan.recipe.get("splits", ["train"])
        return (run, plan.policy, size) if fits else None


def omitted(members: Iterable[Member], partly: Iterable[Training]) -> set[str]:
    """The trajectories that are missing where others of their groups were decided on.

    What was decided on makes up whole groups, with trajectories that were of no use then. Where it does
    not, those that were passed by are missing, the first to end first.

    Args:
        partly: trainings that decided on trajectories of which the log has no opening any more.
    """
    groups: dict[tuple[str, str], list[Member]] = defaultdict(list)
    trainings: dict[Training, set[tuple[str, str]]] = defaultdict(set)
    for member in members:
        if member.group is not None:
            groups[member.group].append(member)
            for taken in member.taken:
                trainings[taken.training].add(member.group)
    unknown = {training[:2] for training in partly}
    return {
        missing.trajectory_id
        for training, names in trainings.items()
        if training[:2] not in unknown
        for name in names
        for missing in _missing(groups[name], training)
    }


def _missing(members: Iterable[Member], training: Training) -> list[Member]:
    """Those of a group that a training passed by, as many as are missing."""
    cuts, beside, count = list[Cut](), list[tuple[Position, Member]](), 0
    for member in members:
        own = [taken.cut for taken in member.taken if taken.training == training]
        cuts += own
        count += bool(own)
        if not own and member.finished is not None:
            beside.append((member.finished, member))
    passed_by = [
        (at, member) for at, member in beside if member.waits and any(member.of_use(cut) for cut in cuts)
    ]
    missing = -count % training[2] - (len(beside) - len(passed_by))
    return [member for _, member in sorted(passed_by, key=lambda pair: pair[0])[: max(missing, 0)]]


TRAINED, DROPPED, WAITING, IN_FLIGHT, KEPT_OUT = TERMS
TEXT_ONLY, ALTERED, ERASED = "text only", "altered", "erased"
OTHER_PATH = "other_path"
UNDELIVERED, LATE, NO_VERSION = "undelivered", "late", "no version"
OMITTED = "omitted"

Where = tuple[str, str | None]
"""A term, and of dropped and kept out the rule or reason."""

_UNDECIDED: frozenset[Where] = frozenset(
    [(IN_FLIGHT, None), (WAITING, None), (KEPT_OUT, UNDELIVERED), (KEPT_OUT, LATE)]
)
"""Tokens without a version that went nowhere else are kept out for that."""


@dataclass(frozen=True, slots=True, order=True)
class Maker:
    """A run, and the policy version that sampled a token; both None where the engine named none."""

    run: str
    policy: str | None
    version: int | None


@dataclass(slots=True)
class Entry:
    """Distinct turns, and tokens."""

    turns: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sampled tokens by policy version and by term of the ledger.

    Attributes:
        entries: no entry has zero tokens but that of turns which are text only.
        generated: tokens of completed turns, counted from their lengths and spans alone.
    """

    entries: Mapping[tuple[Maker, Where], Entry]
    generated: Mapping[Maker, int]

    def unaccounted(self) -> dict[Maker, int]:
        """Generated tokens minus those of all terms, where not zero; empty if the ledger balances."""
        left = dict(self.generated)
        for (maker, _), entry in self.entries.items():
            left[maker] = left.get(maker, 0) - entry.tokens
        return {maker: tokens for maker, tokens in left.items() if tokens}


@dataclass(frozen=True, slots=True)
class _Use:
    """A committed attempt consumed a sample (rule None), or dropped it, at this cut."""

    rule: str | None
    cut: Cut
    whole: bool = False
    """Whether its sample has all turns of its path, also those that an earlier leaf would own."""


@dataclass(slots=True)
class _Turn:
    """What is known of a turn. `asked` is the position of its request."""

    asked: Position | None = None
    parent: str | None = None
    length: int | None = None
    """Of its completion; None unless it completed."""
    makers: Counter[Maker] = field(default_factory=Counter)
    altered: bool = False
    erased: bool = False
    delivered: list[Position] = field(default_factory=list)


@dataclass(slots=True)
class _Trajectory:
    """What is known of a trajectory."""

    opened: Position | None = None
    group: tuple[str, str] | None = None
    """Its run, and the group's name."""
    split: str = ""
    omitted: bool = False
    void: bool = False
    finished: Position | None = None
    turns: dict[str, _Turn] = field(default_factory=lambda: defaultdict(_Turn))
    adoptions: dict[Position, str] = field(default_factory=dict)
    places: dict[str, Position] = field(default_factory=dict)
    uses: dict[str, list[_Use]] = field(default_factory=lambda: defaultdict(list))
    taken: list[DecidedSample] = field(default_factory=list)


def fold_ledger(events: Iterable[Event]) -> Ledger:
    """The ledger of a log, from its events up to a cut: lanes in any order, each lane in its own.

    That a trajectory gets no completed turn after it has finished is taken for granted.

    Raises:
        CutError: the manifest of a committed step names no cut.
    """
    trajectories: dict[str, _Trajectory] = defaultdict(_Trajectory)
    steps = _Steps()
    for event in events:
        if not steps.take(event):
            _take(trajectories, event)
    steps.settle(trajectories)
    _mark_omitted(trajectories)
    return _sum(trajectories.values())


_Attempt = tuple[str, str, int, int]
"""Run, policy, step and attempt."""


@dataclass(slots=True)
class _Steps:
    """What trainings did."""

    plans: dict[_Attempt, StepPlanned] = field(default_factory=dict)
    committed: set[_Attempt] = field(default_factory=set)
    abandoned: set[_Attempt] = field(default_factory=set)
    drops: list[tuple[Event, SampleDropped]] = field(default_factory=list)
    planners: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    openings: Openings = field(default_factory=Openings)

    def take(self, event: Event) -> bool:
        """Fold one event; false if it is of something else."""
        match event.record:
            case RunOpened() as record:
                self.openings.open(event.lane, event.seq, event.run, record)
            case StepPlanned() as record:
                self.plans[event.run, record.policy, record.step, record.attempt] = record
                self.planners[event.lane, event.run].append((event.seq, record.policy))
                self.openings.plan(event.lane, event.run, record)
            case StepCommitted() | StepAbandoned() as record:
                done = self.committed if isinstance(record, StepCommitted) else self.abandoned
                done.add((event.run, record.policy, record.step, record.attempt))
            case SampleDropped() as record:
                self.drops.append((event, record))
            case _:
                return False
        return True

    def settle(self, trajectories: dict[str, _Trajectory]) -> None:
        """Note what committed attempts, that were not abandoned, consumed and dropped."""
        counts = (self.committed - self.abandoned) & self.plans.keys()
        final = {key: (self.plans[key], parse_cut(self.plans[key].cut)) for key in counts}
        for (run, *_), (plan, cut) in final.items():
            for taken in self.openings.consumed(run, plan):
                trajectories[taken.trajectory_id].taken.append(taken)
            for ref in plan.samples:
                use = _Use(None, cut, _one_path(plan))
                trajectories[ref["trajectory_id"]].uses[ref["turn_id"]].append(use)
        for event, drop in self.drops:
            planners = self.planners[event.lane, event.run]
            planner = next((p for seq, p in planners if seq > event.seq), None)
            for (run, policy, step, attempt), (plan, cut) in final.items():
                if (run, step, attempt) == (event.run, drop.step, drop.attempt) and planner in (None, policy):
                    use = _Use(drop.rule, cut, _one_path(plan) and drop.rule != OTHER_PATH)
                    trajectories[drop.trajectory_id].uses[drop.turn_id].append(use)
                    for taken in self.openings.dropped(run, plan, event.lane, event.seq, drop):
                        trajectories[taken.trajectory_id].taken.append(taken)


def _mark_omitted(trajectories: Mapping[str, _Trajectory]) -> None:
    members = [
        Member(
            name,
            None if trajectory.opened is None else trajectory.group,
            None if trajectory.void else trajectory.finished,
            trajectory.split == "train" and not trajectory.uses,
            trajectory.taken,
            partial(_of_use, trajectory),
        )
        for name, trajectory in trajectories.items()
    ]
    partly = {
        t.training
        for trajectory in trajectories.values()
        if trajectory.opened is None
        for t in trajectory.taken
    }
    for name in omitted(members, partly):
        trajectories[name].omitted = True


def _of_use(trajectory: _Trajectory, cut: Cut) -> bool:
    """Whether it had ended by a cut, and had something to train on."""
    sampled = (turn for turn in trajectory.turns.values() if turn.length and not turn.altered)
    there = any(holds(cut, *place) for turn in sampled for place in turn.delivered)
    return there and trajectory.finished is not None and holds(cut, *trajectory.finished)


def _one_path(plan: StepPlanned) -> bool:
    """Whether its recipe takes one path of each trajectory, with all of its turns."""
    return bool(plan.recipe.get("paths", "all") != "all")


def _take(trajectories: dict[str, _Trajectory], event: Event) -> None:
    """Fold one event; events without a trajectory are skipped."""
    record: Any = event.record
    if getattr(record, "trajectory_id", None) is None:
        return
    trajectory = trajectories[record.trajectory_id]
    place = trajectory.places[event.event_id] = (event.lane, event.seq)
    match record:
        case TrajectoryOpened():
            trajectory.opened, trajectory.split = place, record.split
            trajectory.group = None if record.group is None else (event.run, record.group)
        case TrajectoryFinished():
            trajectory.finished = place
            trajectory.void = record.status == VOID
        case TrajectoryAdopted():
            trajectory.adoptions[place] = record.last_event_id
        case TurnRequested():
            turn = trajectory.turns[record.turn_id]
            turn.asked, turn.parent = place, record.parent_turn_id
        case TurnCompleted():
            _complete(trajectory.turns[record.turn_id], event.run, record)
        case TurnDelivered():
            trajectory.turns[record.turn_id].delivered.append(place)


def _complete(turn: _Turn, run: str, record: TurnCompleted) -> None:
    turn.length = len(record.completion_ids)
    turn.makers = Counter({Maker(run, None, None): turn.length})
    for span in record.version_spans:
        turn.makers[Maker(run, span.policy, span.version)] += span.end - span.start
        turn.makers[Maker(run, None, None)] -= span.end - span.start
    turn.altered = bool(record.logprob_semantics.get("altered"))
    turn.erased = TOKENS_ERASED in record.flags


def _sum(trajectories: Iterable[_Trajectory]) -> Ledger:
    entries: dict[tuple[Maker, Where], Entry] = defaultdict(Entry)
    generated: dict[Maker, int] = defaultdict(int)
    for trajectory in trajectories:
        for turn in trajectory.turns.values():
            for maker, tokens in turn.makers.items():
                generated[maker] += tokens
        for turn, where in _decide(trajectory):
            for maker, tokens in turn.makers.items():
                if tokens or (where[1] == TEXT_ONLY and maker.version is None):
                    lost = maker.version is None and where in _UNDECIDED
                    entry = entries[maker, (KEPT_OUT, NO_VERSION) if lost else where]
                    entry.turns, entry.tokens = entry.turns + 1, entry.tokens + tokens
    return Ledger(dict(entries), {maker: tokens for maker, tokens in generated.items() if tokens})


def _decide(trajectory: _Trajectory) -> Iterator[tuple[_Turn, Where]]:
    """The term of each completed turn."""
    owners, above = _owners(trajectory)
    spoiled = {
        leaf for leaf in set(owners.values()) if any(turn.erased for _, turn in _path(trajectory, leaf))
    }
    leaves = {taken.leaf for taken in trajectory.taken}
    for turn_id, turn in trajectory.turns.items():
        if turn.length is not None:
            owner = owners.get(turn_id, "")
            uses = [
                use
                for leaf in above.get(turn_id, [""])
                for use in trajectory.uses.get(leaf, [])
                if use.whole or leaf == owner
            ]
            where = _where(trajectory, turn, uses, spoiled=owner in spoiled)
            seen = any(holds(taken.cut, *at) for taken in trajectory.taken for at in turn.delivered)
            left_out = trajectory.omitted or (seen and owner not in leaves)
            yield turn, (KEPT_OUT, OMITTED) if left_out and where == (WAITING, None) else where


def _where(trajectory: _Trajectory, turn: _Turn, uses: list[_Use], *, spoiled: bool) -> Where:
    if not turn.length:
        return KEPT_OUT, TEXT_ONLY
    if trajectory.opened is None or turn.asked is None:
        return IN_FLIGHT, None
    if turn.altered:
        return KEPT_OUT, ALTERED
    rules = [use.rule for use in uses if _saw(use.cut, trajectory, turn)]
    if None in rules:
        return TRAINED, None
    if rules:
        return DROPPED, min((rule for rule in rules if rule is not None), key=_before)
    if trajectory.void or trajectory.split != "train":
        return KEPT_OUT, VOID if trajectory.void else trajectory.split
    if spoiled:
        return KEPT_OUT, ERASED
    if trajectory.finished is None:
        return IN_FLIGHT, None
    if not turn.delivered:
        return KEPT_OUT, UNDELIVERED
    return (KEPT_OUT, LATE) if uses else (WAITING, None)


def _before(rule: str) -> tuple[bool, str]:
    """Sort key of the rules that dropped a turn: that it is not on the path that was taken says least."""
    return rule == OTHER_PATH, rule


def _saw(cut: Cut, trajectory: _Trajectory, turn: _Turn) -> bool:
    """Whether the turn was delivered by the cut of a plan.

    A plan is believed where its cut does not hold the end of a trajectory that it names.
    """
    if trajectory.finished is None or not holds(cut, *trajectory.finished):
        return bool(turn.delivered)
    return any(holds(cut, *place) for place in turn.delivered)


def _owners(trajectory: _Trajectory) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Completed turn -> the first leaf, in turn order, on whose path it lies; and all such leaves."""
    done = {i: t for i, t in trajectory.turns.items() if t.length is not None and t.asked is not None}
    inner = {turn.parent for turn in done.values()}
    owners: dict[str, str] = {}
    above: dict[str, list[str]] = defaultdict(list)
    for leaf in _in_turn_order(trajectory, [turn_id for turn_id in done if turn_id not in inner]):
        for turn_id, _ in _path(trajectory, leaf):
            owners.setdefault(turn_id, leaf)
            above[turn_id].append(leaf)
    return owners, above


def _in_turn_order(trajectory: _Trajectory, turn_ids: list[str]) -> list[str]:
    requested = {turn_id: trajectory.turns[turn_id].asked or ("", -1) for turn_id in turn_ids}
    if trajectory.opened is None:
        return sorted(turn_ids, key=lambda turn_id: requested[turn_id])
    ownership = OwnershipChain(trajectory.opened, trajectory.adoptions, trajectory.places)
    return sorted(turn_ids, key=lambda turn_id: ownership.key(requested[turn_id]))


def _path(trajectory: _Trajectory, leaf: str) -> Iterator[tuple[str, _Turn]]:
    """The completed turns from a leaf to its root, as far as the events hold them."""
    node: str | None = leaf
    while node is not None and node in trajectory.turns and trajectory.turns[node].length is not None:
        yield node, trajectory.turns[node]
        node = trajectory.turns[node].parent
