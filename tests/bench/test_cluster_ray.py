"""bench cluster's part about Ray, in small: all sides print the same, and each has its rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.bench import cluster_ray
from rollbook.bench.cluster_ray import ONE, TWO, WORKERS, Measured, Plan

pytestmark = pytest.mark.timeout(600)


def test_it_measures_every_side(folder: Path) -> None:
    """Once a round, in a cluster that is there and in one of its own."""
    rounds: list[None] = []
    plan = Plan(sealed=40, live=20, rounds=1)
    measured = cluster_ray.measure(folder, plan, lambda: rounds.append(None))
    assert len(rounds) == plan.steps == 2
    assert {name: len(walls) for name, walls in measured.walls.items()} == dict.fromkeys(WORKERS, 1)
    assert measured.trajectories == 60


def test_a_ratio_is_of_two_over_one() -> None:
    """The median over the rounds."""
    walls = {name: [3.0, 4.0, 5.0] for name in WORKERS} | {ONE: [6.0, 8.0, 20.0], TWO: [3.0, 4.0, 5.0]}
    outcome = cluster_ray.outcome(Measured(walls, 7))
    assert [(f.figure, f.ratio) for f in outcome.figures] == [
        ("cluster.ray_samples", 2.0),
        ("cluster.ray_samples_alone", 1.0),
        ("cluster.ray_samples_vs_here", 1.0),
    ]
    assert outcome.figures[0].value == 4.0
