"""`append.*`: durable appends compared with the bare disk, and with peers' ways of writing.

Every commit is 40 events of about 14 KB. In each round all sides write the same turns, one after
the other, and the order changes from round to round. A side's input (events, dicts, an Arrow
table, bytes) is made just before its turn and not timed; encoding, checksums, threads and syncs
are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, Spread, quantile, spread
from rollbook.bench.open_loop import Served, Traffic, answer_at_once, arrivals, produce
from rollbook.bench.rounds import Lap, Laps, Limit, Side, Work, interleave, order, times_faster, walls
from rollbook.bench.sinks import Commits, DuckDBSink, JsonlSink, LogSink, RawSink, Sink, SqliteSink
from rollbook.bench.turns import bare_bytes, make_turns
from rollbook.store.events import TurnCompleted
from rollbook.store.wal.files import lane_folder, segment_numbers, segment_path
from rollbook.store.wal.frame import read_frame

GROUPED, SINGLE = "grouped", "single"
LOG, RAW, JSONL, DUCKDB, SQLITE = "log", "raw", "jsonl", "duckdb", "sqlite"
ALONE = "producer alone"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(20, 25.0))
    events: int = 40
    """Events in a commit."""
    commits: int = 12
    """Commits of each side in a round."""
    in_flight: int = 3
    """Appends that wait for their acknowledgement at a time: the next is encoded while one is flushed."""
    single: int = 48
    """Commits of one event in a round, each acknowledged before the next."""
    turns: int = 160
    """Different turns; the rounds take them in turn."""
    traffic: Traffic = field(default_factory=Traffic)
    passes: int = 3
    """Runs of the open loop, each beside one of the producer alone."""

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return 2 * self.limit.rounds + self.passes


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements: laps of commits in groups and alone, open-loop runs, and bytes written."""

    plan: Plan
    grouped: Laps
    single: Laps
    served: Sequence[tuple[Served, Served]]
    """(the log, the producer alone) of each pass."""
    log_bytes: int
    """Of the grouped commits' frames."""
    raw_bytes: int
    bare_bytes: float


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Write all sides into `folder`, taking turns. Calls `on_round` after each round.

    Raises:
        WriteFailedError, OSError: the disk refuses, for instance because it is full.
    """
    log = store.open(folder / "store", create=True)
    turns = make_turns(plan.turns)
    # A group is one commit: the writer neither waits for more nor puts two into one flush.
    whole = log.settings().append.model_copy(update={"group_events": plan.events})
    with contextlib.ExitStack() as stack:
        sqlite = stack.enter_context(contextlib.closing(SqliteSink(folder / "sqlite.db")))
        grouped: dict[str, Sink] = {
            LOG: LogSink(stack.enter_context(log.writer(GROUPED, whole)), plan.in_flight),
            RAW: stack.enter_context(contextlib.closing(RawSink(folder / "raw"))),
            JSONL: stack.enter_context(contextlib.closing(JsonlSink(folder / "events.jsonl"))),
            DUCKDB: stack.enter_context(contextlib.closing(DuckDBSink(folder / "duck.db"))),
            SQLITE: sqlite,
        }
        grouped_laps = interleave(_sides(grouped, turns, plan.commits, plan.events), plan.limit, on_round)
        raw_bytes = (folder / "raw").stat().st_size
        single: dict[str, Sink] = {
            LOG: LogSink(stack.enter_context(log.writer(SINGLE)), 1),
            RAW: stack.enter_context(contextlib.closing(RawSink(folder / "raw-single"))),
            SQLITE: sqlite,
        }
        single_laps = interleave(_sides(single, turns, plan.single, 1), plan.limit, on_round)
        writer = stack.enter_context(log.writer("open-loop"))
        served = []
        for number in range(plan.passes):
            due = arrivals(plan.traffic, number)
            appends = {LOG: writer.append, ALONE: answer_at_once}
            ran = {name: produce(appends[name], turns, due) for name in order(list(appends), number)}
            served.append((ran[LOG], ran[ALONE]))
            on_round()
    return Measured(
        *(plan, grouped_laps, single_laps, tuple(served)),
        *(_batch_bytes(lane_folder(log.path, GROUPED)), raw_bytes, bare_bytes(turns)),
    )


def _sides(
    sinks: Mapping[str, Sink], turns: Sequence[TurnCompleted], commits: int, events: int
) -> dict[str, Side]:
    def side(sink: Sink) -> Side:
        def ready(number: int) -> Work:
            prepared = sink.prepare(_commits(turns, number + 1, commits, events))
            return lambda: sink.write(prepared)

        return ready

    return {name: side(sink) for name, sink in sinks.items()}


def _commits(turns: Sequence[TurnCompleted], number: int, commits: int, events: int) -> Commits:
    """The turns of a round, commit by commit; the rounds cycle through the turns."""
    flat: Iterator[int] = iter(range(number * commits * events, (number + 1) * commits * events))
    return [[turns[next(flat) % len(turns)] for _ in range(events)] for _ in range(commits)]


def _batch_bytes(folder: Path) -> int:
    """Bytes of the lane's batch frames: its segments without the header frame of each."""
    total = 0
    for number in segment_numbers(folder):
        data = segment_path(folder, number).read_bytes()
        total += len(data) - read_frame(memoryview(data), 0).end
    return total


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    plan = measured.plan
    events = plan.commits * plan.events
    figures = [
        _faster("append.vs_raw", "write + fdatasync of the same bytes", measured.grouped, RAW, events),
        _faster("append.vs_jsonl", "JSONL (orjson) + fdatasync", measured.grouped, JSONL, events),
        _faster(
            "append.vs_duckdb", "a DuckDB file, a transaction a commit", measured.grouped, DUCKDB, events
        ),
        _cpu(measured.grouped, events),
        _faster(
            "append.single_vs_sqlite", "SQLite WAL, synchronous=FULL", measured.single, SQLITE, plan.single
        ),
        _faster(
            "append.single_vs_raw", "write + fdatasync of the same events", measured.single, RAW, plan.single
        ),
        *_open_loop(measured.served),
        _size(measured),
    ]
    spreads = [
        *_rates("events/s", measured.grouped, events, lambda lap: lap.wall_s),
        *_rates("events/CPU second", measured.grouped, events, lambda lap: lap.cpu_s),
        *_rates("single events/s", measured.single, plan.single, lambda lap: lap.wall_s),
        *_latencies(measured.served),
    ]
    return Outcome(tuple(figures), tuple(spreads))


def _faster(name: str, against: str, laps: Laps, side: str, events: int) -> Figure:
    ours, theirs = walls(laps[LOG]), walls(laps[side])
    value, other = (median(events / s for s in seconds) for seconds in (ours, theirs))
    against = f"{against}: {other:.0f} events/s"
    return Figure(name, value, "events/s", against, times_faster(ours, theirs), len(ours))


def _cpu(laps: Laps, events: int) -> Figure:
    ours, theirs = ([lap.cpu_s for lap in laps[side]] for side in (LOG, SQLITE))
    value, other = (median(events / s for s in seconds) for seconds in (ours, theirs))
    against = f"SQLite WAL, synchronous=FULL: {other:.0f} events/CPU s"
    ratio = times_faster(ours, theirs)
    return Figure("append.cpu_vs_sqlite", value, "events/CPU s", against, ratio, len(ours))


def _open_loop(served: Sequence[tuple[Served, Served]]) -> list[Figure]:
    def middle(metric: Callable[[Served], float], at: int = 0) -> float:
        return median(metric(both[at]) for both in served)

    sleep = middle(lambda s: quantile(s.overshoot_ms, 99))
    alone = middle(lambda s: s.cores, 1)
    runs = len(served)
    figures = [
        Figure(
            *(f"append.ack_p{q}_ms", middle(lambda s, q=q: quantile(s.ack_ms, q)), "ms"),  # type: ignore[misc]
            *(f"asyncio.sleep overshoot in the same run, p99: {sleep:.2f} ms", None, runs),
        )
        for q in (50, 99)
    ]
    against = f"the producer alone: {alone:.2f} cores"
    return [*figures, Figure("append.cores", middle(lambda s: s.cores), "cores", against, None, runs)]


def _size(measured: Measured) -> Figure:
    rounds = len(measured.grouped[LOG]) + 1
    size = measured.log_bytes / (rounds * measured.plan.commits * measured.plan.events)
    against = f"bare values: {measured.bare_bytes:.0f} bytes"
    return Figure("append.bytes_per_event", size, "bytes", against, None, rounds)


def _rates(unit: str, laps: Laps, events: int, seconds: Callable[[Lap], float]) -> list[Spread]:
    return [spread(side, unit, [events / seconds(lap) for lap in laps[side]]) for side in laps]


def _latencies(served: Sequence[tuple[Served, Served]]) -> list[Spread]:
    ours, alone = zip(*served, strict=True)
    return [
        *(
            spread(f"acknowledgement p{q}", "ms", [quantile(s.ack_ms, q) for s in ours])
            for q in (50, 99, 100)
        ),
        spread("asyncio.sleep overshoot p99", "ms", [quantile(s.overshoot_ms, 99) for s in ours]),
        spread("cores, with the log", "cores", [s.cores for s in ours]),
        spread("cores, the producer alone", "cores", [s.cores for s in alone]),
    ]
