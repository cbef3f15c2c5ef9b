"""The rollouts' benchmark: its figures, that its agents talk as the load generator does, and a small run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.bench import rollouts
from rollbook.bench.figure import Figure
from rollbook.bench.processes import BenchError
from rollbook.bench.rollout_outcome import Hostile, Lap, Measured
from rollbook.bench.rounds import Limit
from rollbook.rollouts.launchers.isolation import LEVELS, missing

SMALL = rollouts.Plan(
    **{"limit": Limit(1, 30.0), "concurrency": 4, "trajectories": 8, "turns": 2, "starts": 2, "hostile": 18},
    **{"hostile_concurrency": 9, "programs": 4, "programs_concurrency": 2, "kills": 1, "ray": False},
)


def _laps(*rates: float) -> list[Lap]:
    return [Lap(rate, {"proxy": 2.0}) for rate in rates]


def test_the_values_of_the_figures() -> None:
    """Ratios and differences are medians of each round's; the worst agent's lines are the value."""
    measured = Measured(
        laps={
            "load generator": _laps(100.0, 300.0, 200.0),
            "python": _laps(90.0, 150.0, 140.0),
            "subprocess": _laps(40.0, 20.0, 40.0),
            "ray": _laps(30.0, 30.0, 20.0),
        },
        started={"plain": [30.0, 31.0, 90.0], "auto": [50.0, 71.0, 100.0], "session": [40.0, 40.0, 40.0]},
        hostile=Hostile({"done": 400, "agent_error": 600}, 2, 100.0),
        recovered={"process": [2.0, 4.0, 3.0], "actor": [5.0, 7.0, 6.0]},
        lines={"one": 0, "two": 2},
    )
    outcome = rollouts.outcome(measured)
    figures = {figure.figure: figure for figure in outcome.figures}
    assert {name: (f.value, f.ratio) for name, f in figures.items()} == {
        "rollouts.python_per_s": (140.0, 0.7),
        "rollouts.subprocess_overhead_ms": (20.0, None),
        "rollouts.leaked": (2, None),
        "rollouts.ray_vs_plain": (30.0, 0.75),
        "rollouts.recover_s": (3.0, None),
        "rollouts.recover_actor_s": (6.0, None),
        "rollouts.lines_to_integrate": (2, None),
    }
    assert figures["rollouts.leaked"].against == "1000 launches in 100 s: 600 agent_error, 400 done"
    spreads = {spread.what: spread for spread in outcome.spreads}
    assert (spreads["python"].low, spreads["python"].high) == (90.0, 150.0)
    assert spreads["to the first request, session"].middle == 40.0


def test_a_small_run(tmp_path: Path) -> None:
    """All of it but Ray, against a real proxy: every agent is answered rightly, and nothing is left."""
    rounds: list[None] = []
    measured = rollouts.measure(tmp_path, SMALL, lambda: rounds.append(None))
    assert len(rounds) == SMALL.steps == 5
    assert {side: len(laps) for side, laps in measured.laps.items()} == {
        **{"load generator": 1, "python": 1},
        **{"subprocess": 1},
    }
    levels = [level for level in LEVELS if missing(level) is None]
    assert {way: len(took) for way, took in measured.started.items()} == dict.fromkeys(
        ["plain", "auto", *levels], 2
    )
    assert min(map(min, measured.started.values())) > 0
    assert sum(measured.hostile.by_status.values()) == 18
    assert {"done", "agent_error"} <= measured.hostile.by_status.keys()
    assert measured.hostile.left == 0
    [took] = measured.recovered["process"]
    assert 0 < took < 60
    figures: dict[str, Figure] = {f.figure: f for f in rollouts.outcome(measured).figures}
    assert 0 < (figures["rollouts.python_per_s"].ratio or 0) < 3
    assert "rollouts.ray_vs_plain" not in figures


def test_a_wrong_reply_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured of agents that are not answered as they should be."""
    monkeypatch.setattr(rollouts, "CHAT", "/nowhere")
    with pytest.raises(BenchError, match="wrong replies"):
        rollouts.measure(tmp_path, SMALL, lambda: None)


def test_what_is_left_is_found() -> None:
    """By its word, whatever its environment."""
    word = "31234500042"
    child = subprocess.Popen(["/usr/bin/env", "-i", "sleep", word])
    try:
        while not rollouts.with_word(word):
            assert child.poll() is None
        assert rollouts.with_word(word) == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert rollouts.with_word(word) == []


def test_lines_of_ours() -> None:
    """A line that names Rollbook counts, in whatever case."""
    assert rollouts.lines_of_ours("import os\nROLLBOOK = 1\nprint('rollbook')\n") == [
        "ROLLBOOK = 1",
        "print('rollbook')",
    ]
    assert set(rollouts.examples_lines() or {}) >= {"arithmetic", "langgraph", "mini-swe", "browser"}


def test_a_program_is_of_the_standard_library(root: Path) -> None:
    """It starts as fast as Python does."""
    words = [sys.executable, "-S", "-c", "import rollout_program, sys; print('site' in sys.modules)"]
    result = subprocess.run(words, cwd=root / "bench", capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
