"""bench bits: its figures are of the side that is farthest, and the same step twice must be the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollbook.bench import bits
from rollbook.bench.bits import OTHERS, PLAIN, SAME, STAGES, Apart, Plan, measure, outcome
from rollbook.bench.processes import BenchError
from rollbook.replay.step.tolerances import Comparison, Worst

pytestmark = pytest.mark.torch


def _apart(side: str, stage: str, most: float, share: float) -> Apart:
    worst = Worst("x", (0,), 1.0, 1.0 + most, 1, share)
    return Apart("float32", side, stage, most, Comparison("equal within", worst if share else None))


def test_the_farthest_side_is_told() -> None:
    """By how far it is, and what of the tolerance that is; the same again is no side."""
    measured = [_apart(side, stage, 0.0, 0.0) for side in (SAME, "near", "far") for stage in STAGES]
    measured += [_apart("near", "weights", 0.1, 0.2), _apart("far", "weights", 0.3, 0.7)]
    figures = {figure.figure: figure for figure in outcome(measured).figures}
    weights = figures["bits.float32.weights"]
    assert (weights.value, weights.ratio, weights.unit) == (0.3, 0.7, "of the rate")
    assert weights.against == "its tolerance; farthest: far"
    assert figures["bits.float32.losses"].ratio == 0.0
    assert list(figures) == [f"bits.float32.{stage}" for stage in STAGES]


class _Sides:
    """Processes that write a step, each with its own number for logprobs."""

    def __init__(self, folder: Path, numbers: Callable[[str, int], float]) -> None:
        self._file, self._numbers, self._asked = folder / bits.FILE, numbers, 0
        self._name = ""

    def of(self, variables: dict[str, str]) -> _Sides:
        self._name, self._asked = "".join(variables), 0
        return self

    def __enter__(self) -> _Sides:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, dtype: str, **way: int) -> None:
        number = self._numbers(self._name, self._asked)
        self._asked += 1
        arrays = {f"{stage}/w.x": np.ones(4, np.float32) for stage in STAGES}
        np.savez(self._file, **arrays | {"logprobs/0": np.array([1, number], np.float32)})  # type: ignore[arg-type]


@pytest.fixture
def model_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process reads it."""
    monkeypatch.setattr(bits, "make_model", lambda *_: None)


@pytest.mark.usefixtures("model_is_not_made")
def test_every_side_is_held_against_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its own process, and each with a variable."""
    sides = _Sides(tmp_path, lambda name, times: 2.25 if name == "MKL_CBWR" else 2.0)
    monkeypatch.setattr(bits, "_process", lambda folder, variables: sides.of(variables))
    rounds: list[int] = []
    plan = Plan(("float32",))
    measured = measure(tmp_path, plan, lambda: rounds.append(1))
    assert len(rounds) == plan.steps == 1 + len(PLAIN) + len(OTHERS)
    far = {
        measurement.side: measurement.most for measurement in measured if measurement.found.verdict != "equal"
    }
    assert far == {"MKL's compatible code": 0.125}
    assert {measurement.side for measurement in measured} == {*PLAIN, *OTHERS}


@pytest.mark.usefixtures("model_is_not_made")
def test_two_outcomes_of_the_same_step_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tolerance is measured where a process does not even repeat itself."""
    sides = _Sides(tmp_path, lambda name, times: 2.0 + times)
    monkeypatch.setattr(bits, "_process", lambda folder, variables: sides.of(variables))
    with pytest.raises(BenchError, match="came out in two ways: logprobs"):
        measure(tmp_path, Plan(("float32",)), lambda: None)
