"""The benchmark of tables, in small: every unit is in every table, and each call is counted once."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.storage.tables import NAMES, planned, table_of

from rollbook import store as rb
from rollbook.bench import cluster_tables
from rollbook.bench.rounds import Limit


def test_units_are_registered(tmp_path: Path) -> None:
    """By the command, then one by one."""
    plan = cluster_tables.Plan(limit=Limit(1, 60.0), units=3, turns=2, repeats=2)
    rounds: list[None] = []
    measured = cluster_tables.measure(tmp_path, plan, lambda: rounds.append(None))
    assert (measured.files, len(rounds)) == (9, 1)
    assert [len(s) for s in (measured.register_s, measured.nothing_s, measured.one_s)] == [1, 2, 2]
    log = rb.open(tmp_path / "store-0")
    assert [len(planned(table_of(log, name))) for name in NAMES] == [5, 5, 5]
    names = [figure.figure for figure in cluster_tables.outcome(measured).figures]
    assert names == ["cluster.register_s", "cluster.register_nothing_s"]
