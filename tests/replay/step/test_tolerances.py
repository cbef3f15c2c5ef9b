"""Tolerances where bits are not promised: what they say of given numbers, and of a real step's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.bench import bits_side, train_sides
from rollbook.bench.bits_side import LR, Way, first_step
from rollbook.replay.step.tolerances import (
    NARROW,
    TOLERANCES,
    Tolerance,
    compare,
    compare_stage,
    tolerance_of,
)
from rollbook.train.step.stages import STAGES

ROUGH = Tolerance("for tests", rtol=0.1, atol=1.0)


def _arrays(*values: float, dtype: Any = np.float32) -> dict[str, Any]:
    return {"x": np.array(values, dtype)}


# Given numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "found", "tolerance", "verdict"),
    [
        (_arrays(1, 2), _arrays(1, 2), Tolerance("exact"), "equal"),
        (_arrays(1, np.nan), _arrays(1, np.nan), Tolerance("exact"), "equal"),
        (_arrays(1, 2), _arrays(1, 2.0000002), Tolerance("exact"), "differs"),
        (_arrays(0.0), _arrays(-0.0), Tolerance("exact"), "differs"),
        (_arrays(0.0), _arrays(-0.0), ROUGH, "equal within"),
        (_arrays(10, 2), _arrays(12, 2), ROUGH, "equal within"),
        (_arrays(10, 2), _arrays(12.1, 2), ROUGH, "differs"),
        (_arrays(10, 2), _arrays(8, 2), ROUGH, "equal within"),
        (_arrays(10, 2), _arrays(7.9, 2), ROUGH, "differs"),
        (_arrays(10, np.nan), _arrays(10, 2), ROUGH, "differs"),
        (_arrays(10, 2), _arrays(10, np.nan), ROUGH, "differs"),
        (_arrays(np.inf, 2), _arrays(np.inf, 2.5), ROUGH, "equal within"),
        (_arrays(np.inf), _arrays(-np.inf), ROUGH, "differs"),
        (_arrays(9, 9), _arrays(9, np.inf), ROUGH, "differs"),
        (_arrays(100, 0), _arrays(100, 0.9), Tolerance("", of_largest=0.01), "equal within"),
        (_arrays(-100, 0), _arrays(-100, 1.1), Tolerance("", of_largest=0.01), "differs"),
        (_arrays(1, 2), _arrays(1, 2.015), Tolerance("", of_rate=2.0), "equal within"),
        (_arrays(1, 2), _arrays(1, 2.021), Tolerance("", of_rate=2.0), "differs"),
        (_arrays(*[0] * 9), _arrays(*[0.9] * 9), Tolerance("", atol=1.0, typical=0.5), "differs"),
        (_arrays(*[0] * 9), _arrays(0.9, *[0] * 8), Tolerance("", atol=1.0, typical=0.5), "equal within"),
        (_arrays(1, 2, dtype=np.int32), _arrays(1, 3, dtype=np.int32), Tolerance("exact"), "differs"),
        (_arrays(2**60, dtype=np.int64), _arrays(2**60 + 1, dtype=np.int64), Tolerance("exact"), "differs"),
        (_arrays(1, 0, dtype=bool), _arrays(1, 1, dtype=bool), Tolerance("exact"), "differs"),
        ({}, {}, Tolerance("exact"), "equal"),
        (_arrays(), _arrays(), ROUGH, "equal"),
    ],
)
def test_a_verdict(recorded: Any, found: Any, tolerance: Tolerance, verdict: str) -> None:
    """The same bits are equal; other numbers are within what they may be off, together, or differ."""
    result = compare(recorded, found, tolerance, rate=0.01)
    assert (result.verdict, result.unlike) == (verdict, "")
    assert (result.worst is None) == (verdict == "equal")


def test_the_worst_number_is_shown() -> None:
    """By how much of what it may be off it is off: its array and place, both values, and how far apart."""
    recorded = {"a": np.full((2, 3), 10, np.float32), "b": np.zeros((), np.float32)}
    replayed = {"a": recorded["a"].copy(), "b": np.full((), 0.5, np.float32)}
    replayed["a"][1, 2] = np.nextafter(np.float32(10), np.float32(20))
    result = compare(recorded, replayed, ROUGH)
    assert result.verdict == "equal within"
    assert result.worst is not None
    assert (result.worst.name, result.worst.index, result.worst.share) == ("b", (), 0.5)
    exact = compare({"a": recorded["a"]}, {"a": replayed["a"]}, Tolerance("exact")).worst
    assert exact is not None
    assert (exact.name, exact.index, exact.ulps, exact.share) == ("a", (1, 2), 1, math.inf)
    assert str(exact) == "a[1, 2]: recorded 10.0, found 10.000000953674316, 1 ulp apart"
    whole = compare(_arrays(1, dtype=np.int64), _arrays(2, dtype=np.int64), Tolerance("exact")).worst
    assert str(whole) == "x[0]: recorded 1.0, found 2.0"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "in one of both alone: x"),
        ({"x": np.zeros(3, np.float32)}, "x: recorded float32 (2,), found float32 (3,)"),
        ({"x": np.zeros(2)}, "x: recorded float32 (2,), found float64 (2,)"),
        ({"x": 0, "a": 0, "b": 0, "c": 0, "d": 0}, "in one of both alone: a, b, c, and 1 more"),
    ],
)
def test_sets_that_are_not_alike(found: Any, reason: str) -> None:
    """Names, shapes and types are told; nothing is within any tolerance then."""
    result = compare(_arrays(0, 0), found, ROUGH)
    assert (result.verdict, result.worst, result.unlike) == ("differs", None, reason)


_FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
_SHARES = st.floats(0, 1)


@given(
    st.lists(st.tuples(_FLOATS, _FLOATS | st.floats(-1, 1, width=32)), min_size=1, max_size=6),
    st.builds(Tolerance, st.just(""), _SHARES, _SHARES, _SHARES, _SHARES, st.sampled_from([0.5, 1.0])),
)
def test_verdicts_are_those_of_the_definition(pairs: list[tuple[float, float]], tolerance: Tolerance) -> None:
    """As one would write it down, number by number."""
    recorded, replayed = (_arrays(*side) for side in zip(*pairs, strict=True))
    largest = max((abs(number) for number, _ in pairs if math.isfinite(number)), default=0.0)
    shares = []
    for number, other in pairs:
        may = tolerance.rtol * abs(number) + tolerance.atol
        may += tolerance.of_largest * largest + tolerance.of_rate * 0.1
        if number == other or (math.isnan(number) and math.isnan(other)):
            shares.append(0.0)
        elif not math.isfinite(number) or not math.isfinite(other) or may == 0:
            shares.append(math.inf)
        else:
            shares.append(abs(number - other) / may)
    result = compare(recorded, replayed, tolerance, rate=0.1)
    if recorded["x"].tobytes() == replayed["x"].tobytes():
        assert result.verdict == "equal"
        return
    assert result.worst is not None
    assert result.worst.share == pytest.approx(max(shares), rel=1e-9)
    typical = math.hypot(*shares) / math.sqrt(len(shares))
    if max(shares) > 1.000001 or typical > tolerance.typical * 1.000001 or tolerance.exact:
        assert result.verdict == "differs"
    elif max(shares) < 0.999999 and typical < tolerance.typical * 0.999999:
        assert result.verdict == "equal within"


# Stages -------------------------------------------------------------------------------------------


def test_every_stage_has_a_tolerance() -> None:
    """All stages of a step, and its metrics, in either type of weights; bfloat16 is allowed no less."""
    assert set(TOLERANCES) == set(NARROW) == {*STAGES, "metrics"}
    for stage, tolerance in TOLERANCES.items():
        narrow = NARROW[stage]
        assert tolerance.why
        assert narrow.exact == tolerance.exact
        for key in ("rtol", "atol", "of_largest", "of_rate"):
            assert getattr(narrow, key) >= getattr(tolerance, key)
    kept = ("samples", "rewards", "old_logprobs", "rng", "input_weights", "input_optimizer", "advantages")
    assert all(TOLERANCES[stage].exact for stage in kept)
    assert tolerance_of("unheard of").exact


def test_advantages_are_as_near_as_what_they_are_made_of() -> None:
    """Of rewards alone the same bits; with a critic's values, or a reference, as near as those."""
    assert tolerance_of("advantages", ["samples", "rewards", "logprobs"]).exact
    for stage in ("values", "reference_logprobs", "proximal_logprobs"):
        assert tolerance_of("advantages", [stage]).of_largest > TOLERANCES[stage].of_largest
        assert tolerance_of("rewards", [stage]).exact


def test_an_optimizers_kinds_are_held_apart() -> None:
    """Squares are small beside means, which are small beside weights: each is held against its own."""
    kinds = {"w.exp_avg": 1.0, "w.exp_avg_sq": 1e-8, "w.main": 1.0}
    recorded = {name: np.full(1000, value, np.float32) for name, value in kinds.items()}
    assert compare_stage("optimizer", recorded, recorded).verdict == "equal"
    for name, off, verdict in (
        ("w.exp_avg_sq", 1e-9, "differs"),
        ("w.exp_avg_sq", 1e-13, "equal within"),
        ("w.exp_avg", 1e-3, "differs"),
        ("w.main", 1e-3, "equal within"),
        ("w.main", 3e-3, "differs"),
    ):
        replayed = {key: array.copy() for key, array in recorded.items()}
        replayed[name][3] += np.float32(off)
        result = compare_stage("optimizer", recorded, replayed, rate=1e-3)
        assert result.verdict == verdict, (name, off)
        assert result.worst is not None
        assert (result.worst.name, result.worst.index) == (name, (3,))


def test_bfloat16_weights_are_counted_in_their_own_steps() -> None:
    """One step of bfloat16 is many of float32; what is not of the weights' type is counted in its own."""
    recorded, replayed = _arrays(1.0), _arrays(1.0 + 2**-7)
    narrow = compare_stage("weights", recorded, replayed, dtype="bfloat16", rate=1e-3).worst
    wide = compare_stage("logprobs", recorded, replayed, dtype="bfloat16").worst
    assert narrow is not None
    assert wide is not None
    assert (narrow.ulps, wide.ulps) == (1, 2**16)


# A real step --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Takes the benchmark's step, smaller; the arrays of its stages."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LONGEST": 64, "VOCAB": 256}.items():
            patch.setattr(train_sides, name, value)
        train_sides.make_model(folder, train_sides.Size(64, 2, 4))
        yield lambda **way: first_step(folder, Way(**way))


def _stages(arrays: dict[str, Any], stage: str) -> dict[str, Any]:
    return {name.partition("/")[2]: a for name, a in arrays.items() if name.startswith(f"{stage}/")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_step_is_within(step: Callable[..., Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken a sample at a time its numbers are others, and within; with other rewards they are not."""
    recorded, again, split = step(dtype=dtype), step(dtype=dtype), step(dtype=dtype, rows=1)
    stages = ("advantages", "logprobs", "losses", "gradients", "optimizer", "weights", "metrics")

    def verdicts(results: dict[str, Any]) -> dict[str, str]:
        return {
            stage: compare_stage(
                stage, _stages(recorded, stage), _stages(results, stage), dtype=dtype, rate=LR
            ).verdict
            for stage in stages
        }

    assert set(verdicts(again).values()) == {"equal"}
    results = verdicts(split)
    assert results["advantages"] == "equal"
    assert results["gradients"] == results["weights"] == "equal within"
    assert set(results.values()) == {"equal", "equal within"}
    changed = [replace(sample, reward=1 - (sample.reward or 0.0)) for sample in bits_side.rollouts()]
    monkeypatch.setattr(bits_side, "rollouts", lambda: changed)
    other = verdicts(step(dtype=dtype))
    assert {other[stage] for stage in ("losses", "gradients", "optimizer", "weights")} == {"differs"}
