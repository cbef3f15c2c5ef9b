"""Which sealed units may go, and why each other one stays. Pure.

What goes of a lane is a prefix of it, trajectories go whole, and so does what a policy's training wrote down
(`docs/keeping.md` has the reasons). A unit stays that anything which stays needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollbook.store.cut import parse_cut
from rollbook.store.errors import CutError
from rollbook.store.fold.history import History, PolicyKey
from rollbook.store.log.consumer import union
from rollbook.store.sealed.unit import Unit
from rollbook.store.upkeep.retention_spec import Keep, KeepAge, KeepBytes, KeepVersions
from rollbook.store.upkeep.training_needs import needed_by


@dataclass(frozen=True, slots=True)
class LanePart:
    """A sealed unit, or (`unit` is None) what is in none of a lane's units yet, and what it holds.

    Attributes:
        bytes: on the disk, WAL copies and derived files included.
        newest_us: time of its newest event.
        trajectories: that have events of their own here.
        versions: newest version of each policy that sampled tokens here.
        unversioned: it holds completed turns without a policy version (a teacher's).
        training: policies that have events of their training here (policy None: any of the run).
        upkeep: the kinds here that are never dropped (`About.lasting`).
    """

    lane: str
    unit: Unit | None
    next_seq: int
    bytes: int
    newest_us: int
    trajectories: frozenset[str]
    versions: Mapping[PolicyKey, int]
    unversioned: bool
    training: frozenset[tuple[str, str | None]]
    upkeep: frozenset[str]

    @property
    def name(self) -> str:
        """Name for a message."""
        return f"{self.lane}/{self.unit.name}" if self.unit else f"the unsealed events of lane {self.lane}"

    @property
    def wholes(self) -> set[str]:
        """Names of what has events here and goes whole or not at all."""
        trained = {f"the training of {p!r} in run {r!r}" for r, p in self.training if p is not None}
        return trained | {f"trajectory {t}" for t in self.trajectories}


@dataclass(slots=True)
class Cursor:
    """What a consumer has dealt with: the union of all it said; and where it said so last, by lane."""

    cut: dict[str, int] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)
    unreadable: str | None = None


@dataclass(slots=True)
class Facts:
    """What the whole log says that decides what may go."""

    places: list[LanePart] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    published: dict[PolicyKey, int] = field(default_factory=dict)
    training: dict[PolicyKey, History] = field(default_factory=dict)
    cursors: defaultdict[str, Cursor] = field(default_factory=lambda: defaultdict(Cursor))

    def move(self, consumer: str, cut: str, lane: str, seq: int) -> None:
        """Take a `cursor.moved`."""
        cursor = self.cursors[consumer]
        cursor.said[lane] = max(seq, cursor.said.get(lane, 0))
        try:
            cursor.cut = union(cursor.cut, parse_cut(cut))
        except CutError as error:
            cursor.unreadable = str(error)


def decide(
    facts: Facts,
    keep: Keep,
    now_us: int,
    leased: Collection[tuple[str, str]] = (),
    pending: Collection[tuple[str, str]] = (),
) -> list[list[str]]:
    """For each place, in the order of `facts.places`, why it stays; an empty list if it may go.

    Args:
        leased: (lane, unit) that readers have open.
        pending: (lane, unit) whose dropping is recorded already: only a lease keeps them.
    """
    why: list[list[str]] = [[] for _ in facts.places]
    fresh = _kept_by(facts, keep, now_us)
    needed = {t: reason for one in facts.training.values() for t, reason in needed_by(one)}
    for i, place in enumerate(facts.places):
        unit = place.unit
        if unit is None:
            why[i].append("it is not sealed yet")
            continue
        if (place.lane, unit.name) in leased:
            why[i].append("an open reader needs it")
        if (place.lane, unit.name) not in pending:
            why[i] += fresh[i]
            why[i] += _own_reasons(facts, place, needed)
    _close(facts.places, why, pending)
    return why


# What a SPEC keeps ----------------------------------------------------------------------------------


def _kept_by(facts: Facts, keep: Keep, now_us: int) -> list[list[str]]:
    """Why the SPEC alone keeps each place."""
    match keep:
        case KeepAge():
            kept = [p.newest_us >= now_us - keep.age_us for p in facts.places]
            return [[f"--keep {keep.text}: its newest event is younger"] if k else [] for k in kept]
        case KeepBytes():
            return _kept_by_size(facts.places, keep)
        case KeepVersions():
            return [list(_kept_by_version(p, facts.published, keep)) for p in facts.places]


def _kept_by_size(places: Sequence[LanePart], keep: KeepBytes) -> list[list[str]]:
    too_much = sum(place.bytes for place in places) - keep.bytes
    goes: set[int] = set()
    for i in sorted(range(len(places)), key=_age_order(places).__getitem__):
        if too_much > 0 and places[i].unit is not None:
            goes.add(i)
            too_much -= places[i].bytes
    return [[] if i in goes else [f"--keep {keep.text}: it fits"] for i in range(len(places))]


def _age_order(places: Sequence[LanePart]) -> list[tuple[int, int]]:
    """What to sort by, oldest first: never a unit before one that precedes it in its lane."""
    newest: dict[str, int] = {}
    order = []
    for i, place in enumerate(places):
        newest[place.lane] = max(place.newest_us, newest.get(place.lane, 0))
        order.append((newest[place.lane], i))
    return order


def _kept_by_version(
    place: LanePart, published: Mapping[PolicyKey, int], keep: KeepVersions
) -> Iterator[str]:
    for (run, policy), version in sorted(place.versions.items()):
        newest = published.get((run, policy))
        if newest is None:
            yield f"--keep {keep.text}: run {run!r} has published no version of policy {policy!r}"
        elif version >= newest - keep.count:
            yield f"--keep {keep.text}: it holds tokens of version {version} of {newest} of {policy!r}"
    if place.unversioned:
        yield f"--keep {keep.text}: it holds turns without a policy version; keep by age or size instead"


# What needs a unit ----------------------------------------------------------------------------------


def _own_reasons(facts: Facts, place: LanePart, needed: Mapping[str, str]) -> Iterator[str]:
    unfinished = sorted(place.trajectories - facts.finished)
    if unfinished:
        yield f"trajectory {unfinished[0]} is not finished{_more(unfinished)}"
    wanted = sorted(place.trajectories & needed.keys())
    if wanted:
        yield f"{needed[wanted[0]]} needs trajectory {wanted[0]}{_more(wanted)}"
    for run, policy in sorted(place.training, key=str):
        if (going_on := _not_retired(facts, run, policy)) is not None:
            yield f"it holds events of the training of {going_on!r} in run {run!r}, which is not retired"
            break
    for kind in sorted(place.upkeep):
        yield f"it holds {kind}, which says what is no longer there"
    for consumer, cursor in sorted(facts.cursors.items()):
        yield from _kept_by_consumer(place, consumer, cursor)


def _not_retired(facts: Facts, run: str, policy: str | None) -> str | None:
    """The policy, or one of the run, whose training is not over."""
    found = [p for (r, p), one in facts.training.items() if r == run and policy in (None, p)]
    if policy is not None and not found:
        return policy  # published, but not trained here: nothing says that nobody wants it any more
    return next((p for p in found if not facts.training[run, p].over), None)


def _kept_by_consumer(place: LanePart, consumer: str, cursor: Cursor) -> Iterator[str]:
    done, said = cursor.cut.get(place.lane, 0), cursor.said.get(place.lane, -1)
    if cursor.unreadable is not None:
        yield f"nobody knows what consumer {consumer!r} has dealt with: {cursor.unreadable}"
    elif done < place.next_seq:
        yield f"consumer {consumer!r} has dealt with {done} events of lane {place.lane} only"
    elif place.unit is not None and place.unit.first_seq <= said < place.next_seq:
        yield f"it says where consumer {consumer!r} is"


def _more(found: Sequence[str]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


# What stays keeps more ------------------------------------------------------------------------------


def _close(places: Sequence[LanePart], why: list[list[str]], pending: Collection[tuple[str, str]]) -> None:
    """Add what follows: a lane goes up to the first unit that stays, and some things go whole or not."""
    bound = [p.unit is None or (p.lane, p.unit.name) not in pending for p in places]
    while True:
        stays: dict[str, str] = {}
        for place, reasons in zip(places, why, strict=True):
            if reasons:
                stays |= dict.fromkeys(place.wholes - stays.keys(), place.name)
        added = False
        before: dict[str, str] = {}
        for i, place in enumerate(places):
            if not why[i] and bound[i]:
                split = sorted(place.wholes & stays.keys())
                if place.lane in before:
                    why[i].append(f"{before[place.lane]} before it stays")
                elif split:
                    why[i].append(f"{split[0]} has events in {stays[split[0]]}{_more(split)}")
                added = added or bool(why[i])
            if why[i]:
                before.setdefault(place.lane, place.name)
        if not added:
            return
