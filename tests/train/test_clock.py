"""Where the time of a step goes: each moment is counted once, and steps say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.cli.train.training import line_of
from rollbook.store import Store
from rollbook.store.events import StepCommitted
from rollbook.train.clock import clock, timed

PARTS = ("publish", "wait", "data", "scoring", "forward", "backward", "optimizer", "manifest")


def test_each_moment_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins within another interrupts it, also where it fails; where nobody counts, nothing does."""
    moment = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: moment[0])

    @timed("forward")
    def forward(seconds: float) -> None:
        moment[0] += seconds

    @timed("optimizer")
    def step(seconds: float) -> None:
        moment[0] += seconds
        raise ZeroDivisionError

    with clock("rest") as counted:
        moment[0] += 1
        with timed("backward"):
            moment[0] += 2
            forward(4)
            moment[0] += 8
        with pytest.raises(ZeroDivisionError):
            step(16)
        moment[0] += 32
        assert counted.now() == {"rest": 33, "backward": 10, "forward": 4, "optimizer": 16}
        moment[0] += 64
    assert counted.seconds == {"rest": 97, "backward": 10, "forward": 4, "optimizer": 16}
    forward(100)
    assert sum(counted.seconds.values()) == 127


def test_a_step_says_where_its_time_went(recorded: Callable[..., Store]) -> None:
    """Parts that it has take time, the others none; together they are the step and what came before it."""
    log = recorded()
    algorithm = {"name": "grpo", "groups": 2, "group_size": 4, "kl": 0.1}
    fabric.train(log, fabric.config(fabric.GRPO, algorithm=algorithm, checkpoint_every=1))
    columns = ", ".join(f"{part}_s" for part in PARTS)
    query = f"SELECT {columns}, seconds, memory_gib FROM metrics ORDER BY step"
    rows = [dict(zip((*PARTS, "seconds", "memory"), row, strict=True)) for row in _rows(log, query)]
    assert len(rows) == 3
    for at, row in enumerate(rows):
        assert all(row[part] > 0 for part in PARTS if part != "publish")
        assert (row["publish"] > 0) == (at > 0), "the first step follows no checkpoint"
        own = sum(row[part] for part in PARTS if part not in ("publish", "wait"))
        assert own >= row["seconds"] * 0.5, "events are timed by the clock on the wall"
        assert 0.1 < row["memory"] < 64


def _rows(log: Store, query: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = rb.connect(log.path).execute(query).fetchall()
    return rows


def test_what_is_shown_of_it() -> None:
    """Speed over all parts, and those parts that took a twentieth of the time; nothing of older steps."""
    metrics = {"loss": 1.0, "trained_tokens": 100, "memory_gib": 1.26}
    took = {"wait_s": 1.0, "data_s": 0.09, "forward_s": 0.5, "backward_s": 0.41}
    line = line_of(StepCommitted(3, 1, "actor", 4, {}, metrics | took))
    assert line is not None
    assert line.endswith("100 trained tokens  50 tokens/s  1.3 GiB  2 s (wait 1, forward 0.5, backward 0.41)")
    line = line_of(StepCommitted(3, 1, "actor", 4, {}, {"loss": 1.0, "trained_tokens": 100}))
    assert line == "step 3: version 4  loss 1.0000  100 trained tokens"
