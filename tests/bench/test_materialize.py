"""bench materialize, in small: both ways agree, a real store is asked, and each check can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollbook.bench import materialize
from rollbook.bench.materialize import DROPS, HELP, LOOP, NUMBER, SAMPLES, SORT_OUT, Measured, Plan
from rollbook.bench.materialize_loops import LOOPS, NEWEST, Batch, numbers_of, sort_out_by_groups, sorted_out
from rollbook.bench.rounds import Lap, Limit
from rollbook.bench.scale_commands import Use
from rollbook.bench.scale_store import store_in

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
NAMES, ALONE = [*LOOPS, SORT_OUT], [NUMBER, DROPS]


def test_it_measures_both_ways(folder: Path) -> None:
    """Each algorithm, the recipe and the command have their rounds; the command's samples are the store's."""
    rounds: list[None] = []
    plan = Plan(groups=40, group_size=8, trajectories=80, limit=Limit(2), commands=1)
    measured = materialize.measure(folder, plan, lambda: rounds.append(None))
    assert len(rounds) == plan.steps == 4
    assert {name: len(laps) for name, laps in measured.laps.items()} == {
        **{prefix + name: 2 for name in NAMES for prefix in ("", LOOP)},
        **dict.fromkeys(ALONE, 2),
    }
    assert measured.samples == 320
    assert (measured.kept, measured.dropped) == (0, 75), "in so small a store all are as old"
    figures = materialize.outcome(measured).figures
    names = [*NAMES, *ALONE, SAMPLES]
    assert [figure.figure for figure in figures] == [f"materialize.{name}_s" for name in names]
    assert store_in(folder, 640).turns == 640, "with --folder it is there for the next time"


def test_the_batch_is_sorted_out_by_its_rules() -> None:
    """A tenth is too old, and of the others those of each 16th group have equal rewards."""
    batch = Batch.of(1000, 8)
    kept, drops = sorted_out(batch)
    rules = {rule: sum(other == rule for _, other, _ in drops) for _, rule, _ in drops}
    assert rules.keys() == {"staleness", "zero_variance"}
    assert rules["staleness"] == (batch.versions == 0).sum() == pytest.approx(800, rel=0.2)
    assert rules["zero_variance"] == pytest.approx(8000 * 0.9 / 16, rel=0.2)
    assert len(kept) + len(drops) == 8000
    by_loop = sort_out_by_groups(batch)[1]
    assert {rule: sorted(at for at, other, _ in drops if other == rule) for rule in rules} == {
        rule: at.tolist() for rule, at in by_loop.items()
    }
    assert all(
        detail == ({"reward": batch.rewards[at]} if rule == "zero_variance" else detail)
        for at, rule, detail in drops
    )
    assert int(NEWEST - batch.versions[kept].min()) < NEWEST


def test_members_of_a_group_lie_apart() -> None:
    """Group after group comes once before the first comes again."""
    batch = Batch.of(5, 3)
    assert batch.group_names == [f"group-{i}" for i in range(5)] * 3
    assert batch.groups.tolist() == [*range(5)] * 3
    assert len(set(batch.trajectory_names)) == 15
    groups, trajectories = numbers_of(batch)
    assert (groups.tolist(), trajectories.tolist()) == (batch.groups.tolist(), [*range(15)])


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_that_finds_something_else_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other advantages, or another drop, end the benchmark."""
    batch = Batch.of(20, 4)
    materialize._check(batch)
    if name == SORT_OUT:
        kept, drops = sort_out_by_groups(batch)
        fewer = drops | {"staleness": drops["staleness"][1:]}
        monkeypatch.setattr(materialize, "sort_out_by_groups", lambda _: (kept, fewer))
    else:
        other = {**LOOPS, name: lambda batch: LOOPS[name](batch) + np.eye(1, 1)[0]}
        monkeypatch.setattr(materialize, "LOOPS", other)
    with pytest.raises(AssertionError):
        materialize._check(batch)


def test_samples_that_are_missing_are_noticed(folder: Path, tmp_path: Path) -> None:
    """A command that prints fewer samples than there are trajectories ends the benchmark."""
    stored = store_in(folder, 640)
    with pytest.raises(AssertionError, match="of 83 trajectories"):
        materialize._ask(replace(stored, turns=stored.turns + 64), tmp_path, 1, lambda: None)


def test_the_values_of_the_figures() -> None:
    """Medians over the rounds; ratios are those of each round."""
    laps = {name: [Lap(s, s) for s in (1.0, 2.0, 4.0)] for name in NAMES}
    laps |= {LOOP + name: [Lap(s, s) for s in (10.0, 40.0, 40.0)] for name in NAMES}
    laps |= {name: [Lap(s, s) for s in (3.0, 5.0, 4.0)] for name in ALONE}
    uses = {SAMPLES: [Use(0, s) for s in (2.0, 3.0)], HELP: [Use(0, s) for s in (1.0, 2.0)]}
    outcome = materialize.outcome(Measured(laps, 8, uses, 6, 2))
    assert {(figure.value, figure.ratio) for figure in outcome.figures[:-3]} == {(2.0, 10.0)}
    assert {(figure.value, figure.ratio) for figure in outcome.figures[-3:-1]} == {(4.0, None)}
    last = outcome.figures[-1]
    assert (last.figure, last.value, last.ratio, last.runs) == ("materialize.samples_s", 2.5, 1.75, 2)
    assert "6 kept, 2 dropped" in str(last.against)
    assert len(outcome.spreads) == 2 * len(NAMES) + len(ALONE) + 2
