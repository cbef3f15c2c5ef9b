"""bench sql: a small store is made and asked; the sides of every question agree."""

from __future__ import annotations

from pathlib import Path

from rollbook import store as rb
from rollbook.bench import sql
from rollbook.bench.sealed_store import LANE, Shape, make
from rollbook.store.sealed.unit import current_units

SHAPE = Shape(units=6, begin=3)


def test_the_made_store_holds_every_event(tmp_path: Path) -> None:
    """Ten turns a trajectory, two in each of five units; every event is readable and in its place."""
    units: list[None] = []
    log, raw = make(tmp_path / "s", SHAPE, lambda: units.append(None))
    assert len(units) == len(current_units(log.path, LANE)) == 6
    events = list(log.events())
    assert [e.seq for e in events] == list(range(len(events)))
    assert raw > sum(len(e.record.completion_ids) * 4 for e in events if e.kind == "turn.completed")  # type: ignore[union-attr]
    connection = rb.connect(log.path)
    assert connection.execute("SELECT count(*) FROM turns").fetchall() == [(120,)]
    finished = connection.execute(
        "SELECT turns, count(*) FROM trajectories WHERE status = 'completed' GROUP BY ALL"
    )
    assert finished.fetchall() == [(10, 6)]
    spread = (
        "SELECT count(DISTINCT version) FROM (SELECT policy_version AS version, trajectory_id FROM turns) "
    )
    whole = connection.execute("SELECT trajectory_id FROM trajectories WHERE turns = 10 LIMIT 1").fetchall()[
        0
    ][0]
    assert connection.execute(spread + "WHERE trajectory_id = ?", [whole]).fetchall() == [(5,)]


def test_every_question_has_a_figure(tmp_path: Path) -> None:
    """Every question's figure has a value, a ratio and what it is held against."""
    steps: list[None] = []
    plan = sql.Plan(shape=SHAPE, rounds=2, scans=1)
    measured = sql.measure(tmp_path, plan, lambda: steps.append(None))
    assert (measured.turns, len(steps)) == (120, plan.steps)
    figures = {f.figure: f for f in sql.outcome(measured).figures}
    names = ["version_day", "turn_p99", "outlier", "trajectory", "trajectory_sql"]
    assert list(figures) == [f"sql.{name}_ms" for name in names]
    for figure in figures.values():
        assert figure.value > 0
        assert figure.ratio is not None
        assert figure.ratio > 0
        assert "120 turns in" in (figure.against or "")


def test_the_scale_sets_the_turns() -> None:
    """`--scale 1` is 100,000 turns, and the smallest store still has whole trajectories."""
    assert sql.sized(1).shape.turns == 100_000
    assert sql.sized(10).shape.turns == 1_000_000
    assert sql.sized(0.0001).shape.units == 6
