"""The append benchmark, in small: what it writes and what it says. Nothing here is about speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook import store as rb
from rollbook.bench import append, run_bench
from rollbook.bench.figure import Figure, spread
from rollbook.store.errors import ConfigError

TINY = append.Plan(rounds=3, commits=2, events=4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, append.Measured, int]:
    """A tiny measurement: its folder, its result, and how often it told of a round."""
    folder = tmp_path_factory.mktemp("bench")
    told: list[None] = []
    return folder, append.measure(folder, TINY, lambda: told.append(None)), len(told)


def test_both_sides_write_the_same_number_of_bytes(measured: Any) -> None:
    """The log's batch frames and the raw file are equally long, warm-up included."""
    folder, result, _ = measured
    assert result.log_bytes == result.raw_bytes == (folder / "raw").stat().st_size
    assert result.commits_written == (3 + 1) * 2


def test_every_commit_is_an_append_to_a_real_store(measured: Any) -> None:
    """The log side is a store that reads back: every event is there, and no id is used twice."""
    folder, result, rounds = measured
    events = list(rb.open(folder / "store").events())
    assert len(events) == result.commits_written * TINY.events
    assert len({e.event_id for e in events}) == len(events)
    assert rounds == len(result.log_s) == len(result.raw_s) == 3
    assert {len(seconds) for seconds in result.log_s + result.raw_s} == {2}


def test_an_event_is_about_14_kb(measured: Any) -> None:
    """Events are as large as the benchmark says, and little is added to their bare values."""
    _, result, _ = measured
    per_event = result.log_bytes / (result.commits_written * TINY.events)
    assert 13_000 < per_event < 15_000
    assert 0.9 < result.values_per_event / per_event < 1


def test_the_figures(measured: Any) -> None:
    """The ratio is the median over the rounds; only it is a ratio."""
    _, result, _ = measured
    found = append.outcome(result)
    by_name = {f.figure: f for f in found.figures}
    names = ["append.vs_raw", "append.ack_ms.p50", "append.ack_ms.p99", "append.bytes_per_event"]
    assert list(by_name) == names
    ratios = sorted(sum(raw) / sum(log) for log, raw in zip(result.log_s, result.raw_s, strict=True))
    assert by_name["append.vs_raw"].ratio == pytest.approx(ratios[1])
    assert [f.ratio for f in found.figures[1:]] == [None] * 3
    assert all(f.runs == 3 and f.value > 0 for f in found.figures)
    assert by_name["append.ack_ms.p99"].value >= by_name["append.ack_ms.p50"].value
    assert all(s.low <= s.middle <= s.high for s in found.spreads)


def test_it_stops_by_itself(tmp_path: Path) -> None:
    """A limit that has passed ends the measurement after one round."""
    result = append.measure(tmp_path, append.Plan(10**9, 1, 1, limit_s=0.0), lambda: None)
    assert len(result.log_s) == 1


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints a list of objects with exactly the promised keys; nothing is left on the disk."""
    import rollbook.bench as benches

    small = (lambda folder, tell: append.outcome(append.measure(folder, TINY, tell)), TINY.rounds)
    monkeypatch.setitem(benches._BENCHES, "append", small)
    run_bench("append", tmp_path, True)
    rows = orjson.loads(capsys.readouterr().out)
    assert [sorted(row) for row in rows] == [
        sorted(("figure", "value", "unit", "against", "ratio", "runs"))
    ] * 4
    for row in rows:
        assert isinstance(row["figure"], str)
        assert isinstance(row["value"], float)
        assert isinstance(row["unit"], str)
        assert isinstance(row["against"], str)
        assert row["ratio"] is None or isinstance(row["ratio"], float)
    assert list(tmp_path.iterdir()) == []
    run_bench("append", tmp_path, False)
    assert "append.vs_raw" in capsys.readouterr().out


def test_what_cannot_be_run(tmp_path: Path) -> None:
    """An unknown name lists the names; a folder that is not there is named."""
    with pytest.raises(ConfigError, match="'nope': use one of append"):
        run_bench("nope", tmp_path, True)
    with pytest.raises(ConfigError, match="is not a folder"):
        run_bench("append", tmp_path / "none", True)


def test_quantiles_and_spreads() -> None:
    """The p-th percentile is the smallest value that p % of the values do not exceed."""
    values = [float(i) for i in range(1, 201)]
    assert [append._quantile(values, q) for q in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert append._quantile([3.0], 99) == 3.0
    assert spread("x", "ms", [3.0, 1.0, 2.0]).middle == 2.0
    assert Figure("a", 1.0, "s", None, None, 1).as_json()["against"] is None
