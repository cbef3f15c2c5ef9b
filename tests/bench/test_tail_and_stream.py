"""The tail and stream benchmarks, in small: every event is seen, and all sides hand out the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from rollbook import store as rb
from rollbook.bench import stream, tail
from rollbook.bench.open_loop import Traffic
from rollbook.bench.rounds import Limit
from rollbook.store.events import TurnCompleted


def test_the_other_process_is_seen(tmp_path: Path) -> None:
    """Each pass sees each of its events once, later than they were made; the control is beside it."""
    plan = tail.Plan(Traffic(200.0, 0.25), passes=2, turns=5)
    told: list[None] = []
    seen = tail.measure(tmp_path, plan, lambda: told.append(None))
    assert [len(one.visible_ms) for one in seen] == [50, 50]
    assert len(told) == plan.steps == 2
    assert rb.open(tmp_path / "store").head() == {"writer-0": 50, "writer-1": 50}
    assert all(min(one.visible_ms) > 0 and one.overshoot_ms for one in seen)
    found = {f.figure: f for f in tail.outcome(seen).figures}
    assert list(found) == ["tail.visible_p50_ms", "tail.visible_p99_ms", "tail.reader_cores"]
    assert all(f.runs == 2 and f.ratio is None for f in found.values())


def test_the_values_of_the_tail_figures() -> None:
    """The median over the passes of each pass's percentile."""
    passes = [
        tail.Seen([float(i) for i in range(n, n + 100)], [0.5, 0.75], 0.1, 0.2, 2000.0) for n in (1, 11, 2)
    ]
    found = {f.figure: f for f in tail.outcome(passes).figures}
    assert (found["tail.visible_p50_ms"].value, found["tail.visible_p99_ms"].value) == (51.0, 100.0)
    assert "p99: 0.75 ms" in str(found["tail.visible_p99_ms"].against)


def test_a_writer_that_stops_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When events that were announced do not come, the reader gives up and says how many are missing."""
    monkeypatch.setattr(tail, "PATIENCE_S", 0.05)
    log = rb.open(tmp_path / "store", create=True)
    with pytest.raises(TimeoutError, match="3 of 3 events were not seen"):
        tail._read(log, tail.Plan(), 3, {})


def test_the_sides_stream_the_same(tmp_path: Path) -> None:
    """Log and file hold the same turns; stale ones are left out; tokens and bytes are counted."""
    plan = stream.Plan(limit=Limit(2, 30.0), turns=50, batch=8)
    told: list[None] = []
    measured = stream.measure(tmp_path, plan, lambda: told.append(None))
    turns = [e.record for e in rb.open(tmp_path / "store").events()]
    lines = [orjson.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [t.turn_id for t in turns if isinstance(t, TurnCompleted)] == [v["turn_id"] for v in lines]
    fresh = [t for t in turns if isinstance(t, TurnCompleted) and (t.policy_version or 0) >= stream.FRESH]
    assert 0 < len(fresh) < 50
    assert measured.tokens == sum(len(t.prompt_ids) + len(t.completion_ids) for t in fresh)
    assert measured.bytes == 9 * measured.tokens
    assert {side: len(laps) for side, laps in measured.laps.items()} == {"stream": 2, "jsonl": 2, "memcpy": 2}
    found = stream.outcome(measured).figures
    assert [f.figure for f in found] == ["stream.vs_jsonl", "stream.vs_memcpy"]
    assert all(f.ratio is not None and f.ratio > 0 for f in found)
    assert len(told) == plan.steps == 2


def test_the_peers_reader(tmp_path: Path) -> None:
    """Lines become flat batches: stale ones are left out, prompts masked, the last batch is shorter."""
    lines = [
        {"policy_version": v, "prompt_ids": [v, v], "completion_ids": [9], "logprobs": [-0.5]}
        for v in (2, 1, 3, 4)
    ]
    (tmp_path / "f").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    first, last = stream.read_jsonl(tmp_path / "f", 2)
    assert [a.tolist() for a in first] == [[2, 2, 9, 3, 3, 9], [0, 0, -0.5, 0, 0, -0.5], [0, 0, 1, 0, 0, 1]]
    assert [a.tolist() for a in last] == [[4, 4, 9], [0, 0, -0.5], [0, 0, 1]]
    assert [a.dtype for a in first] == [np.int32, np.float32, np.uint8]
