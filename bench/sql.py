"""`bench sql`: questions of many sealed turns, each beside what a user would do without Rollbook.

- `sql.version_day_ms`: mean reward by policy version and day, from `trajectories`; against a DuckDB table in
  memory of just these columns.
- `sql.turn_p99_ms`: p99 latency, from `turns`; against a DuckDB table in memory of just that column.
- `sql.outlier_ms`: tokens with a logprob below -10, from `outliers`; against `tokens`, which reads them all.
- `sql.trajectory_ms`: `store.trajectory(id)`, all of a trajectory that was written over five segments;
  against `read_parquet` of all sealed turns with a filter.
- `sql.trajectory_sql_ms`: the same from `turns`, all columns; against the same.

The store is sealed, compacted and derived as the sealer would leave it. Every question has been asked once
before it is timed, so the files are in the page cache and their footers are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.rounds import Laps, Limit, Side, interleave, times_faster, walls
from rollbook.bench.sealed_store import LANE, Shape, make
from rollbook.store import Store
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.unit import TURNS, current_units
from rollbook.store.sql.sandbox import Connection
from rollbook.store.upkeep.compact import compact, remove_superseded

BY_VERSION_AND_DAY = """
SELECT max_version, date_trunc('day', opened) AS day, avg(reward)
FROM trajectories GROUP BY ALL ORDER BY ALL"""
P99 = "SELECT quantile_cont(latency_ms, 0.99) FROM turns"
UNLIKELY = "SELECT count(*) FROM {} WHERE logprob < -10"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: the shape of the store, and how often to ask.

    Every token is looked at in the raw scan, so it is asked `scans` times only.
    """

    shape: Shape = field(default_factory=lambda: Shape(20))
    rounds: int = 15
    scans: int = 2
    seconds: float = 120.0

    @property
    def steps(self) -> int:
        """How often `on_round` is called."""
        return self.shape.units + self.rounds + self.scans


def sized(scale: float) -> Plan:
    """A plan of `scale` times 100,000 turns."""
    return Plan(shape=Shape(max(round(20 * scale), 6)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Laps of every side, and what the store is."""

    turns: int
    files: int
    laps: Laps
    scans: Laps
    rows: dict[str, int]


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Make the store in `folder` and ask. Calls `on_round` after each unit and each round.

    Raises:
        OSError: the disk refuses, for instance because it is full.
        AssertionError: two sides do not agree.
    """
    return ask(prepare(folder / "store", plan.shape, on_round), plan, on_round)


def prepare(folder: Path, shape: Shape, on_unit: Callable[[], None]) -> Store:
    """A store of this shape at `folder`, sealed, compacted and derived as the sealer would leave it."""
    log, _ = make(folder, shape, on_unit)
    for unit, _old in compact(log.path, LANE, log.settings().seal):
        build_derived(log.path, unit)
    remove_superseded(log.path, LANE)
    return log


def ask(log: Store, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Ask the questions of a store that `prepare` made. Calls `on_round` after each round.

    Raises:
        AssertionError: two sides do not agree.
    """
    connection = store.connect(log.path)
    ids = [row[0] for row in connection.execute(_whole_trajectories()).fetchall()]
    bare = _bare(connection)
    answers = _answers(connection, bare)
    for chosen in ids[: plan.rounds]:  # what is timed is warm: footers are read, pages are in memory
        log.trajectory(chosen)
        connection.execute("SELECT * FROM turns WHERE trajectory_id = ?", [chosen]).fetchall()
    laps = interleave(_sides(log, connection, bare, ids), Limit(plan.rounds, plan.seconds), on_round)
    scans = interleave(
        {
            "outliers": lambda _: lambda: connection.execute(UNLIKELY.format("outliers")).fetchall(),
            "every token": lambda _: lambda: connection.execute(UNLIKELY.format("tokens")).fetchall(),
        },
        Limit(plan.scans, plan.seconds),
        on_round,
    )
    units = len(current_units(log.path, LANE))
    connection.close()
    return Measured(answers["turns"], units, laps, scans, answers)


def _whole_trajectories() -> str:
    """Ids of trajectories that have all their turns, spread over the whole log."""
    return "SELECT trajectory_id FROM trajectories WHERE turns = 10 ORDER BY hash(trajectory_id) LIMIT 200"


def _bare(connection: Connection) -> duckdb.DuckDBPyConnection:
    """A DuckDB database in memory with one table a question, of just the columns it needs."""
    bare = duckdb.connect(":memory:")
    for name, query in (
        ("trajectories", "SELECT max_version, opened, reward FROM trajectories"),
        ("turns", "SELECT latency_ms FROM turns"),
    ):
        bare.register("rows", connection.sql(query).to_arrow_table())
        bare.execute(f"CREATE TABLE {name} AS SELECT * FROM rows")
    return bare


def _answers(ours: Connection, bare: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """How much each question finds; both sides must find the same."""
    by_day = ours.execute(BY_VERSION_AND_DAY).fetchall()
    theirs = bare.execute(BY_VERSION_AND_DAY).fetchall()
    # Sums of floats depend on their order in the last bits.
    assert [(v, d, r and round(r, 9)) for v, d, r in by_day] == [
        (v, d, r and round(r, 9)) for v, d, r in theirs
    ]
    assert ours.execute(P99).fetchall() == bare.execute(P99).fetchall()
    [outliers], [tokens] = (ours.execute(UNLIKELY.format(v)).fetchall() for v in ("outliers", "tokens"))
    assert outliers == tokens
    [turns] = ours.execute("SELECT count(*) FROM turns").fetchall()
    return {"turns": turns[0], "groups": len(by_day), "outliers": outliers[0]}


def _sides(
    log: Store, ours: Connection, bare: duckdb.DuckDBPyConnection, ids: Sequence[str]
) -> dict[str, Side]:
    files = [str(path) for path in sorted(log.path.glob(f"sealed/{LANE}/[0-9]*/{TURNS}"))]
    plain = duckdb.connect(":memory:")

    def asked(connection: Connection | duckdb.DuckDBPyConnection, query: str) -> Side:
        return lambda _: lambda: connection.execute(query).fetchall()

    def of_one(connection: Connection | duckdb.DuckDBPyConnection, source: str) -> Side:
        def side(number: int) -> Callable[[], object]:
            chosen = [ids[number % len(ids)]]
            return lambda: connection.execute(
                f"SELECT * FROM {source} WHERE trajectory_id = ?", chosen
            ).fetchall()

        return side

    return {
        "version_day": asked(ours, BY_VERSION_AND_DAY),
        "version_day bare": asked(bare, BY_VERSION_AND_DAY),
        "turn_p99": asked(ours, P99),
        "turn_p99 bare": asked(bare, P99),
        "trajectory": lambda number: lambda: log.trajectory(ids[number % len(ids)]),
        "trajectory_sql": of_one(ours, "turns"),
        "parquet": of_one(plain, f"read_parquet({files})"),
    }


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    laps, scans = measured.laps, measured.scans
    size = f"{measured.turns:,} turns in {measured.files} sealed units"

    def figure(
        name: str, ours: Sequence[float], other: str, theirs: Sequence[float], *, ratio: bool
    ) -> Figure:
        middle = spread(name, "ms", [1e3 * s for s in ours]).middle
        beside = spread(other, "ms", [1e3 * s for s in theirs]).middle
        faster = times_faster(ours, theirs) if ratio else None
        return Figure(f"sql.{name}_ms", middle, "ms", f"{other}: {beside:.1f} ms; {size}", faster, len(ours))

    table = "DuckDB table in memory of just these columns"
    scanned = "read_parquet of all turns, filtered"
    figures = (
        figure("version_day", walls(laps["version_day"]), table, walls(laps["version_day bare"]), ratio=True),
        figure("turn_p99", walls(laps["turn_p99"]), table, walls(laps["turn_p99 bare"]), ratio=True),
        figure("outlier", walls(scans["outliers"]), "every token", walls(scans["every token"]), ratio=True),
        figure("trajectory", walls(laps["trajectory"]), scanned, walls(laps["parquet"]), ratio=True),
        figure("trajectory_sql", walls(laps["trajectory_sql"]), scanned, walls(laps["parquet"]), ratio=True),
    )
    every = {**laps, **scans}
    spreads = tuple(spread(name, "ms", [1e3 * s for s in walls(times)]) for name, times in every.items())
    return Outcome(figures, spreads)
