"""The append benchmark, in small: what every side writes and what it says. Nothing here is about speed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import duckdb
import numpy as np
import orjson
import pytest

from rollbook import store as rb
from rollbook.bench import append
from rollbook.bench.open_loop import Traffic, arrivals
from rollbook.bench.rounds import Limit

TINY = append.Plan(
    limit=Limit(2, 60.0), events=8, commits=2, single=3, turns=20, traffic=Traffic(200.0, 0.1), passes=2
)
WRITTEN = (2 + 1) * 2 * 8
"""Events of a side's grouped commits: two rounds and the warm-up."""
SINGLE = (2 + 1) * 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, append.Measured, int]:
    """A tiny measurement: its folder, its result, and how often it told of a round."""
    folder = tmp_path_factory.mktemp("bench")
    rounds: list[None] = []
    return folder, append.measure(folder, TINY, lambda: rounds.append(None)), len(rounds)


def test_the_log_and_the_bare_file_have_equal_sizes(measured: tuple[Path, append.Measured, int]) -> None:
    """The log's frames and the raw file have the same number of bytes, warm-up included."""
    folder, result, _ = measured
    assert result.log_bytes == result.raw_bytes == (folder / "raw").stat().st_size


def test_every_store_under_test_wrote_the_same_turns(measured: tuple[Path, append.Measured, int]) -> None:
    """Log, JSON lines, DuckDB and SQLite hold the same ids and logprobs, in the same order."""
    folder, _, _ = measured
    events = [e for e in rb.open(folder / "store").events() if e.lane == append.GROUPED]
    assert len(events) == WRITTEN == len({e.event_id for e in events})
    ours = [
        (t.turn_id, t.prompt_ids.tolist(), t.completion_ids.tolist(), t.logprobs.tolist())
        for t in (e.record for e in events)
    ]
    lines = [orjson.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    assert ours == [
        (v["turn_id"], v["prompt_ids"], v["completion_ids"], _float32(v["logprobs"])) for v in lines
    ]
    columns = "turn_id, prompt_ids, completion_ids, logprobs"
    with duckdb.connect(str(folder / "duck.db")) as duck:
        rows = duck.execute(f"select {columns} from events order by rowid").fetchall()
    assert ours == [(*row[:3], _float32(row[3])) for row in rows]
    rows = sqlite3.connect(folder / "sqlite.db").execute(f"select {columns} from events").fetchall()
    assert len(rows) == WRITTEN + SINGLE
    kinds = (np.int32, np.int32, np.float32)
    for row, expected in zip(rows, ours, strict=False):
        blobs = [np.frombuffer(blob, kind).tolist() for blob, kind in zip(row[1:], kinds, strict=True)]
        assert (row[0], *blobs) == expected


def _float32(values: list[float]) -> list[float]:
    return np.array(values, np.float32).tolist()


def test_commits_are_of_the_stated_size(measured: tuple[Path, append.Measured, int]) -> None:
    """Grouped appends are one frame each, however many are in flight; single ones are acknowledged alone."""
    folder, _, _ = measured
    store = rb.open(folder / "store")
    assert [b.num_rows for lane, b in store.batches() if lane == append.GROUPED] == [8] * (WRITTEN // 8)
    assert store.head() == {"grouped": WRITTEN, "single": SINGLE, "open-loop": 2 * 20}
    assert sqlite3.connect(folder / "sqlite.db").execute("pragma journal_mode").fetchone() == ("wal",)


def test_an_event_is_about_14_kb(measured: tuple[Path, append.Measured, int]) -> None:
    """Events are as large as the benchmark says, and little is added to their bare values."""
    _, result, _ = measured
    per_event = result.log_bytes / WRITTEN
    assert 13_000 < per_event < 15_000
    assert 0.9 < result.bare_bytes / per_event < 1


def test_figures_have_a_ratio_where_the_goal_is_one(measured: tuple[Path, append.Measured, int]) -> None:
    """Names, ratios and runs: only what has a goal that is a ratio has one."""
    _, result, count = measured
    figures = {f.figure: f for f in append.outcome(result).figures}
    ratios = ["vs_raw", "vs_jsonl", "vs_duckdb", "cpu_vs_sqlite", "single_vs_sqlite", "single_vs_raw"]
    others = ["ack_p50_ms", "ack_p99_ms", "cores", "bytes_per_event"]
    assert list(figures) == [f"append.{name}" for name in ratios + others]
    assert [name for name, f in figures.items() if f.ratio is not None] == [f"append.{n}" for n in ratios]
    laps = result.grouped
    rounds = [raw.wall_s / log.wall_s for log, raw in zip(laps["log"], laps["raw"], strict=True)]
    assert figures["append.vs_raw"].ratio == pytest.approx(sum(rounds) / 2)
    assert all(f.value > 0 for f in figures.values())
    assert [f.runs for f in figures.values()] == [2] * 6 + [2, 2, 2, 3]
    assert figures["append.ack_p99_ms"].value >= figures["append.ack_p50_ms"].value
    assert count == TINY.steps == 6
    assert all(s.low <= s.middle <= s.high for s in append.outcome(result).spreads)


def test_every_event_of_the_open_loop_is_acknowledged(measured: tuple[Path, append.Measured, int]) -> None:
    """As many latencies as events, with the log and without; sleeps were watched meanwhile."""
    _, result, _ = measured
    assert [len(s.ack_ms) for both in result.served for s in both] == [20] * 4
    assert all(s.overshoot_ms and s.cores > 0 for both in result.served for s in both)


def test_open_loop_arrivals_are_a_poisson_process() -> None:
    """Gaps of a Poisson process: mean 1/rate, and as wide as their mean; the same for the same seed."""
    due = arrivals(Traffic(1000.0, 20.0), 3)
    gaps = np.diff(due)
    assert len(due) == 20_000
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.001, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert due == arrivals(Traffic(1000.0, 20.0), 3) != arrivals(Traffic(1000.0, 20.0), 4)
    assert len(arrivals(Traffic(1.0, 0.0), 0)) == 1
