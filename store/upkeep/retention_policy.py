"""Which sealed units may go, and why each other one stays.

Units go from the beginning of a lane only, a trajectory goes as a whole, and so do the events of
a policy's training (`docs/keeping.md` has the reasons). A unit stays if anything that stays
needs it.

The steps of a policy need the trajectories that they are replayed from.

A step is replayed from the nearest checkpoint before it that has its optimizer's state, through
all steps in between (`History.starts`); a training is resumed in the same way.

The facts to decide by are scalars of every event, and a few kinds of events in full.

`ended_by` says which steps could no longer be replayed, and which trainings no longer resumed,
without a trajectory's tokens.

Parses how much retention keeps: `7d`, `500GiB` or `versions:20`.

Pure. Stricter than Pydantic's ByteSize, which reads a number without a unit as bytes and ignores the case of
units: a misread value would remove data.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import parse_cut
from rollbook.store.errors import CutError, UpkeepError
from rollbook.store.events import CursorMoved, StepPlanned
from rollbook.store.events.event import kinds_where
from rollbook.store.fold.history import KINDS, History, PolicyKey, fold_histories
from rollbook.store.log.consumer import union
from rollbook.store.log.store import Store
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, current_units, derived_folder
from rollbook.store.upkeep.find import find_trajectory, live_units, unsealed
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")
_VERSIONS = re.compile(r"versions:(\d{1,9})")


@dataclass(frozen=True, slots=True)
class KeepAge:
    """Units whose newest event is at most this old, in microseconds, stay."""

    text: str
    age_us: int


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """The newest units stay, as many as fit into this many bytes with all that is not sealed."""

    text: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KeepVersions:
    """Units with a token of the newest `count` published versions of its policy, or the one before, stay."""

    text: str
    count: int


Keep = KeepAge | KeepBytes | KeepVersions


def parse_keep(text: str) -> Keep:
    """Parse a SPEC: a number with a unit of time or of bytes, or `versions:N`.

    Raises:
        UpkeepError: it says neither.
    """
    if (versions := _VERSIONS.fullmatch(text)) is not None:
        return KeepVersions(text, int(versions[1]))
    amount = _AMOUNT.fullmatch(text)
    if amount is not None and amount[2] in _SECONDS:
        return KeepAge(text, round(float(amount[1]) * _SECONDS[amount[2]] * 1e6))
    if amount is not None and amount[2] in _BYTES:
        return KeepBytes(text, round(float(amount[1]) * _BYTES[amount[2]]))
    raise UpkeepError(
        f"--keep {text!r}: write an age ({', '.join(_SECONDS)}; e.g. 7d or 12h), a size "
        f"({', '.join(_BYTES)}; e.g. 500GiB), or versions:N (e.g. versions:20)"
    )


@dataclass(frozen=True, slots=True)
class LanePart:
    """A sealed unit, or (`unit` is None) the unsealed part of a lane, and what it holds.

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
        """Names of the trajectories and trainings with events here, which are kept or dropped as a
        whole."""
        trained = {f"the training of {p!r} in run {r!r}" for r, p in self.training if p is not None}
        return trained | {f"trajectory {t}" for t in self.trajectories}


@dataclass(slots=True)
class Cursor:
    """What a consumer has processed: the union of all its cuts; and, by lane, where it last
    recorded one."""

    cut: dict[str, int] = field(default_factory=dict)
    recorded: dict[str, int] = field(default_factory=dict)
    unreadable: str | None = None


@dataclass(slots=True)
class Facts:
    """The facts about the whole log that decide what may go."""

    places: list[LanePart] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    published: dict[PolicyKey, int] = field(default_factory=dict)
    training: dict[PolicyKey, History] = field(default_factory=dict)
    cursors: defaultdict[str, Cursor] = field(default_factory=lambda: defaultdict(Cursor))

    def move(self, consumer: str, cut: str, lane: str, seq: int) -> None:
        """Take a `cursor.moved`."""
        cursor = self.cursors[consumer]
        cursor.recorded[lane] = max(seq, cursor.recorded.get(lane, 0))
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
    needed = {t: reason for history in facts.training.values() for t, reason in needed_by(history)}
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
            stays = [p.newest_us >= now_us - keep.age_us for p in facts.places]
            return [[f"--keep {keep.text}: its newest event is younger"] if k else [] for k in stays]
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
        yield f"it holds {kind}, which is never dropped"
    for consumer, cursor in sorted(facts.cursors.items()):
        yield from _kept_by_consumer(place, consumer, cursor)


def _not_retired(facts: Facts, run: str, policy: str | None) -> str | None:
    """The policy, or one of the run, whose training is not over."""
    policies = [p for (r, p), history in facts.training.items() if r == run and policy in (None, p)]
    if policy is not None and not policies:
        return policy  # published, but not trained here: nothing says that nobody wants it any more
    return next((p for p in policies if not facts.training[run, p].over), None)


def _kept_by_consumer(place: LanePart, consumer: str, cursor: Cursor) -> Iterator[str]:
    done, cursor_seq = cursor.cut.get(place.lane, 0), cursor.recorded.get(place.lane, -1)
    if cursor.unreadable is not None:
        yield f"nobody knows what consumer {consumer!r} has dealt with: {cursor.unreadable}"
    elif done < place.next_seq:
        yield f"consumer {consumer!r} has dealt with {done} events of lane {place.lane} only"
    elif place.unit is not None and place.unit.first_seq <= cursor_seq < place.next_seq:
        yield f"it says where consumer {consumer!r} is"


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# What stays keeps more ------------------------------------------------------------------------------


def _close(places: Sequence[LanePart], why: list[list[str]], pending: Collection[tuple[str, str]]) -> None:
    """Add the reasons that follow: a lane is dropped only up to the first unit that stays, and some
    things only as a whole."""
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


@dataclass(frozen=True, slots=True)
class Ended:
    """What an erasure ends.

    Attributes:
        steps: that could no longer be replayed.
        resume: the version of the checkpoint whose following steps could not be run again to
            resume the training; None if resuming needs nothing that is erased.
    """

    steps: tuple[int, ...]
    resume: int | None


def needed_by(history: History) -> Iterator[tuple[str, str]]:
    """(trajectory, who needs it) for every step that is not retired, and for resuming the training."""
    owner = f"of policy {history.policy!r} in run {history.run!r}"
    for step, plan in sorted(history.pending.items()):
        if step not in history.retired:
            yield from ((t, f"planned step {step} {owner}") for t in _trajectories(plan))
    plans, starts = _plans(history), _starts(history)
    reach, who = 1 << 62, ""
    last = max(plans, default=None)
    if last is not None and last not in history.retired:
        reach = _base(starts[plans[last].phase], plans[last].policy_version + 1)
        who = "going on with the training"
    # From the last step down: a step is needed if it, or one after it, starts from it or from before it.
    for step, plan in sorted(plans.items(), key=lambda item: -item[1].policy_version):
        base = _base(starts[plan.phase], plan.policy_version)
        if step not in history.retired and base <= reach:
            reach, who = base, f"step {step}"
        if plan.policy_version >= reach:
            yield from ((t, f"{who} {owner}") for t in _trajectories(plan))


def ended_by(history: History, trajectory: str) -> Ended:
    """What could no longer be done without the tokens of a trajectory."""
    plans, starts = _plans(history), _starts(history)
    using = sorted(plan.policy_version for plan in plans.values() if trajectory in _trajectories(plan))

    def read_from(first: int, last: int) -> bool:
        return bisect_right(using, last) > bisect_left(using, first)

    steps = [
        step
        for step, plan in plans.items()
        if step not in history.retired
        and read_from(_base(starts[plan.phase], plan.policy_version), plan.policy_version)
    ]
    last = max(plans, default=None)
    resume = None
    if last is not None and last not in history.retired:
        base = _base(starts[plans[last].phase], plans[last].policy_version + 1)
        resume = base if read_from(base, plans[last].policy_version) else None
    return Ended(tuple(steps), resume)


def _plans(history: History) -> dict[int, StepPlanned]:
    """The plans of the committed steps, in order."""
    return {number: step.planned for number, step in sorted(history.steps.items())}


def _trajectories(plan: StepPlanned) -> set[str]:
    return {ref["trajectory_id"] for ref in plan.samples}


def _starts(history: History) -> dict[str, list[int]]:
    """Phase -> versions of the checkpoints that its steps may be started from, rising."""
    phases = {step.planned.phase for step in history.steps.values()}
    return {phase: sorted(c.policy_version for c in history.starts(phase)) for phase in phases}


def _base(starts: list[int], version: int) -> int:
    """Version of the checkpoint from which the state before an update of `version` is restored.

    Without one the step cannot be replayed, and needs its own samples only.
    """
    at = bisect_right(starts, version)
    return starts[at - 1] if at else version


_SCALARS = ["kind", "run", "trajectory_id", "policy", "policy_version", "time"]


def training_histories(log: Store) -> dict[PolicyKey, History]:
    """The training histories of the store, by (run, policy).

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    return fold_histories(log.events_of(KINDS))


def scan(log: Store) -> Facts:
    """Read every unit that is not dropped, and the unsealed events; units lane by lane, each in order.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    facts = Facts()
    rest: dict[str, list[pa.RecordBatch]] = {lane: [] for lane in log.lanes()}
    for lane, batch in unsealed(log):
        rest[lane].append(batch)
    for lane, batches in rest.items():
        units = current_units(log.path, lane)
        for unit in units:
            if unit.dropped_us is None:
                tables = [read_file(log.path, unit, name, _SCALARS) for name in (TURNS, MARKS)]
                size = unit_bytes(log, unit)
                facts.places.append(_place(facts, lane, unit, unit.next_seq, size, tables))
        if batches:
            table = pa.Table.from_batches(batches)
            size, end = _unsealed_bytes(log, lane, units), int(table["seq"][-1].as_py()) + 1
            facts.places.append(_place(facts, lane, None, end, size, [table.select(_SCALARS)]))
    # Afterwards: what a plan names that was written meanwhile is in these places, or in none that may go.
    facts.training = training_histories(log)
    for event in log.events_of({CursorMoved.KIND}):
        if isinstance(event.record, CursorMoved):
            facts.move(event.record.consumer, event.record.cut, event.lane, event.seq)
    return facts


def unit_bytes(log: Store, unit: Unit) -> int:
    """Bytes that the unit takes: its files, what is left of its segments as WAL, and what is derived."""
    folder = lane_folder(log.path, unit.lane)
    paths = [segment_path(folder, s.number) for s in unit.segments]
    derived = derived_folder(log.path, unit)
    paths += derived.iterdir() if derived.is_dir() else ()
    return unit.bytes + sum(path.stat().st_size for path in paths if path.exists())


def _unsealed_bytes(log: Store, lane: str, units: list[Unit]) -> int:
    folder = lane_folder(log.path, lane)
    sealed = units[-1].last if units else 0
    last = read_watermark(folder).segment
    numbers = [n for n in segment_numbers(folder) if sealed < n <= last]
    return sum(segment_path(folder, n).stat().st_size for n in numbers)


def _parts_of(what: str) -> list[str]:
    return kinds_where(lambda properties: properties.of == what)


def _is_in(column: Any, kinds: Iterable[str]) -> Any:
    return pc.is_in(column, pa.array(list(kinds)))


def _place(
    facts: Facts, lane: str, unit: Unit | None, next_seq: int, size: int, tables: list[pa.Table]
) -> LanePart:
    table = pa.concat_tables(tables)
    kind = table["kind"]
    ids = table["trajectory_id"].filter(_is_in(kind, _parts_of("trajectory"))).unique().drop_null()
    lasting = kind.filter(_is_in(kind, kinds_where(lambda properties: properties.lasting)))
    ends = table["trajectory_id"].filter(pc.equal(kind, "trajectory.finished")).unique()
    facts.finished |= set(ends.to_pylist())
    for key, version in _newest(table.filter(pc.equal(kind, "policy.published"))).items():
        facts.published[key] = max(version, facts.published.get(key, version))
    turns = table.filter(pc.equal(kind, "turn.completed"))
    training = _pairs(table.filter(_is_in(kind, _parts_of("policy"))))
    training |= {(run, None) for run, _ in _pairs(table.filter(_is_in(kind, _parts_of("run"))))}
    return LanePart(
        lane=lane,
        unit=unit,
        next_seq=next_seq,
        bytes=size,
        newest_us=pc.max(table["time"].cast(pa.int64())).as_py() or 0,
        trajectories=frozenset(ids.to_pylist()),
        versions=_newest(turns.filter(pc.is_valid(turns["policy_version"]))),
        unversioned=turns["policy_version"].null_count > 0,
        training=frozenset(training),
        upkeep=frozenset(lasting.unique().to_pylist()),
    )


def _newest(table: pa.Table) -> Mapping[PolicyKey, int]:
    """The highest policy version of each (run, policy) in the rows."""
    grouped = table.group_by(["run", "policy"]).aggregate([("policy_version", "max")])
    return {(row["run"], row["policy"]): row["policy_version_max"] for row in grouped.to_pylist()}


def _pairs(table: pa.Table) -> set[tuple[str, str | None]]:
    grouped = table.group_by(["run", "policy"]).aggregate([])
    return {(row["run"], row["policy"]) for row in grouped.to_pylist()}


@dataclass(frozen=True, slots=True)
class EndedTraining:
    """What the erasure of a trajectory's tokens ends of the training of one policy in a run."""

    run: str
    policy: str
    ended: Ended


def trainings_ended_by(log: Store, trajectory: str, run: str | None = None) -> list[EndedTraining]:
    """The trainings that an erasure with its tokens would end; empty if one was done, or begun, before.

    Raises:
        UpkeepError: no such trajectory, or several of that name.
        CorruptionError: a file is missing or damaged.
    """
    target = find_trajectory(log, trajectory, run)
    erasures = (erasure for unit in live_units(log) for erasure in unit.erased)
    if any(e.trajectory_id == target.trajectory_id and not e.tokens_kept for e in erasures):
        return []
    ended = [
        EndedTraining(*key, ended_by(history, target.trajectory_id))
        for key, history in sorted(training_histories(log).items())
    ]
    return [training for training in ended if training.ended.steps or training.ended.resume is not None]
