"""`rollbook plot`: the curves that it reads, and what it writes and refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app
from rollbook.cli.train.plot import DASHBOARD, HELD_OUT, Wanted, drawn_metrics, read_curves
from rollbook.store import Store
from rollbook.store.events import EvalFinished, RunOpened


@pytest.fixture
def log(tmp_path: Path) -> Store:
    """Two runs of four and two steps, with rewards 0, 1 and so on; run `a` was evaluated at versions 1 and 4,
    and has a reward model."""
    log = rb.open(tmp_path / "store", create=True)
    for run, steps in (("a", 4), ("b", 2)):
        records: list[Any] = [RunOpened("train", {})]
        for step in range(steps):
            metrics = {"reward": float(step), "loss": -0.5 * step, "entropy": 1.0 if run == "a" else None}
            records += [
                fabric.planned(step, step),
                replace(fabric.committed(step, step + 1), metrics=metrics),
            ]
        fabric.append(log, records, lane="train", run=run)
    held: list[Any] = []
    for version, rewards in ((1, (0.0, 0.5)), (4, (0.75, 0.75))):
        for i, reward in enumerate(rewards):
            turns = [fabric.T(version=version)]
            held += fabric.records(f"e{version}-{i}", turns, split="eval", reward=reward)
    fabric.append(log, held, run="a")
    plan = replace(fabric.planned(0, 0), policy="reward", algorithm={"name": "reward_model"})
    done = replace(fabric.committed(0, 1), policy="reward", metrics={"reward": 0.5})
    fabric.append(log, [plan, done], lane="judge", run="a")
    return log


def _run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output or str(result.exception)


def _read(log: Store, **wanted: Any) -> dict[tuple[str, str], list[tuple[int, float]]]:
    selection = Wanted(**({"runs": [], "policy": "actor", "metrics": [], "by": "step", "first": 0} | wanted))
    return {(c.run, c.metric): c.points for c in read_curves(log, log.head(), selection)}


def test_the_curves_are_the_logs(log: Store) -> None:
    """Of each run those metrics that it has; held-out rewards stand at the step that their version begins, or
    after the last."""
    assert _read(log) == {
        ("a", "reward"): [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)],
        ("b", "reward"): [(0, 0.0), (1, 1.0)],
        ("a", HELD_OUT): [(1, 0.25), (4, 0.75)],
        ("a", "loss"): [(0, 0.0), (1, -0.5), (2, -1.0), (3, -1.5)],
        ("b", "loss"): [(0, 0.0), (1, -0.5)],
        ("a", "entropy"): [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)],
    }


def test_what_is_marked(log: Store) -> None:
    """Evaluations that are not whole, and where a training became another one."""
    part = EvalFinished("actor", 4, "p", "", "", 0, 0, 2, 4, 4, {"reward": 0.75}, 8, False)
    fabric.append(log, [part], lane="train", run="a")
    for step in (4, 5):
        planned = replace(fabric.planned(step, step), phase="another")
        fabric.append(log, [planned, fabric.committed(step, step + 1)], lane="train", run="a")
    selection = Wanted(runs=["a"], policy="actor", metrics=["reward", "loss"], by="step", first=0)
    curves = {curve.metric: curve for curve in read_curves(log, log.head(), selection)}
    assert (curves["reward"].begun, curves["loss"].begun, curves[HELD_OUT].begun) == ((4,), (4,), ())
    assert (curves["reward"].partial, curves[HELD_OUT].partial) == (frozenset(), frozenset({4}))


def test_some_of_them(log: Store) -> None:
    """By run, metric, policy, version, and from a place on; runs in the order they are named in."""
    curves = _read(log, runs=["b", "a"], metrics=["reward", "reward"], first=1, by="version")
    assert curves == {
        ("b", "reward"): [(1, 1.0)],
        ("a", "reward"): [(1, 1.0), (2, 2.0), (3, 3.0)],
        ("a", HELD_OUT): [(1, 0.25), (4, 0.75)],
    }
    assert next(iter(curves)) == ("b", "reward")
    assert _read(log, policy="reward") == {("a", "reward"): [(0, 0.5)]}
    assert _read(log, runs=["b"], first=2) == {}


@pytest.mark.more_but("c.svg*")
@pytest.mark.parametrize(("name", "begins"), [("c.png", b"\x89PNG"), ("c.svg", b"<?xml"), ("c.pdf", b"%PDF")])
def test_what_is_written(log: Store, tmp_path: Path, name: str, begins: bytes) -> None:
    """A picture of the ending's kind; what it shows is said."""
    file = tmp_path / name
    code, out = _run("plot", "--store", log.path, "-o", file)
    assert (code, out.split()) == (0, f"{file}: reward, loss, entropy of a, b".split())
    assert file.read_bytes().startswith(begins)


def test_json(log: Store, tmp_path: Path) -> None:
    """The file, its runs and its panels."""
    file = tmp_path / "c.png"
    code, out = _run("plot", "--store", log.path, "-o", file, "--run", "b", "--json")
    assert (code, json.loads(out)) == (0, {"file": str(file), "runs": ["b"], "panels": ["reward", "loss"]})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--metric", "nope"], "--metric nope: there are policy_version, learning_rate, loss"),
        (["-o", "c.gif"], "--output c.gif: name a file that ends in .png, .svg, .pdf"),
        (["-o", "none/c.png"], "none is no folder"),
        (["--run", "zzz"], "no run 'zzz'; there are: a, b"),
        (["--policy", "zzz"], "policy 'zzz' has no committed step with such metrics"),
        (["--metric", "kl"], "policy 'actor' has no committed step with such metrics"),
    ],
)
def test_what_is_refused(
    log: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    """It is named, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, out = _run("plot", "--store", log.path, *words)
    assert code != 0
    assert reason in " ".join(out.split())
    assert sorted(tmp_path.iterdir()) == before


def test_without_matplotlib(log: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out = _run("plot", "--store", log.path, "-o", tmp_path / "c.png")
    assert code != 0
    assert "pip install 'rollbook[plot]'" in out


def test_the_dashboard_is_of_metrics() -> None:
    """All of it are columns that can be drawn."""
    assert set(DASHBOARD) <= set(drawn_metrics())
