"""The tail benchmark, in small: every event is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook import store as rb
from rollbook.bench import tail
from rollbook.bench.open_loop import Traffic


def test_the_other_process_is_seen(tmp_path: Path) -> None:
    """Each pass sees each of its events once, later than they were made; the control is beside it."""
    plan = tail.Plan(Traffic(200.0, 0.25), passes=2, turns=5)
    rounds: list[None] = []
    passes = tail.measure(tmp_path, plan, lambda: rounds.append(None))
    assert [len(result.visible_ms) for result in passes] == [50, 50]
    assert len(rounds) == plan.steps == 2
    assert rb.open(tmp_path / "store").head() == {"writer-0": 50, "writer-1": 50}
    assert all(min(result.visible_ms) > 0 and result.overshoot_ms for result in passes)
    figures = {f.figure: f for f in tail.outcome(passes).figures}
    assert list(figures) == ["tail.visible_p50_ms", "tail.visible_p99_ms", "tail.reader_cores"]
    assert all(f.runs == 2 and f.ratio is None for f in figures.values())


def test_the_values_of_the_tail_figures() -> None:
    """The median over the passes of each pass's percentile."""
    passes = [
        tail.Seen([float(i) for i in range(n, n + 100)], [0.5, 0.75], 0.1, 0.2, 2000.0) for n in (1, 11, 2)
    ]
    figures = {f.figure: f for f in tail.outcome(passes).figures}
    assert (figures["tail.visible_p50_ms"].value, figures["tail.visible_p99_ms"].value) == (51.0, 100.0)
    assert "p99: 0.75 ms" in str(figures["tail.visible_p99_ms"].against)


def test_a_writer_that_stops_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When events that were announced do not come, the reader gives up and says how many are missing."""
    monkeypatch.setattr(tail, "PATIENCE_S", 0.05)
    log = rb.open(tmp_path / "store", create=True)
    with pytest.raises(TimeoutError, match="3 of 3 events were not seen"):
        tail._read(log, tail.Plan(), 3, {})
