"""The distance of two numbers in units of the last place, over every kind of number there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollbook.replay.step.tolerances import NEVER, ulps

TYPES = ("float64", "float32", "float16", "bfloat16")
WIDTHS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def _of_bits(bits: int, dtype: str) -> Any:
    """The number of these bits, as an array of it; of bfloat16 in float32."""
    if dtype == "bfloat16":
        return np.array([bits << 16], np.uint32).view(np.float32)
    return np.array([bits], f"u{WIDTHS[dtype] // 8}").view(dtype)


@st.composite
def _numbers(draw: st.DrawFn, count: int = 1) -> tuple[Any, ...]:
    """A type, and numbers of it out of any bits: subnormal ones, infinities and NaN are among them."""
    dtype = draw(st.sampled_from(TYPES))
    width = WIDTHS[dtype]
    edges = [0, 1, 1 << (width - 1), (1 << (width - 1)) + 1, (1 << width) - 1]
    bits = st.integers(0, (1 << width) - 1) | st.sampled_from(edges)
    return dtype, *(_of_bits(draw(bits), dtype) for _ in range(count))


def _apart(value: Any, other: Any, dtype: str) -> int:
    (distance,) = ulps(value, other, dtype)
    return int(distance)


@given(_numbers())
def test_the_next_number_is_one_away(given_one: tuple[Any, ...]) -> None:
    """Upwards and downwards, over 0, out of the subnormal numbers, and into infinity."""
    dtype, number = given_one
    if not np.isfinite(number).all():
        return
    for towards in (np.inf, -np.inf):
        if dtype == "bfloat16":
            bits = int(number.view(np.uint32)[0]) >> 16
            magnitude = bits & 0x7FFF
            away = (bits >> 15) == (towards < 0)
            if magnitude == 0:
                following = _of_bits(1 | (0x8000 if towards < 0 else 0), dtype)
            else:
                following = _of_bits((bits & 0x8000) | (magnitude + (1 if away else -1)), dtype)
        else:
            following = np.nextafter(number, number.dtype.type(towards))
        assert _apart(number, following, dtype) == _apart(following, number, dtype) == 1


@given(_numbers(3))
def test_distances_add_up(given_three: tuple[Any, ...]) -> None:
    """In the order of the numbers; what is none is as far as can be from all, and not from its like."""
    dtype, *numbers = given_three
    missing = [number for number in numbers if np.isnan(number).any()]
    there = sorted(
        (number for number in numbers if not np.isnan(number).any()), key=lambda number: float(number[0])
    )
    assert all(_apart(number, other, dtype) == 0 for number in missing for other in missing)
    assert all(_apart(number, other, dtype) == NEVER for number in missing for other in there)
    for low, middle, high in zip(there, there[1:], there[2:], strict=False):
        assert _apart(low, high, dtype) == _apart(low, middle, dtype) + _apart(middle, high, dtype)
    for number in there:
        zero = np.zeros_like(number)
        assert (
            _apart(number, -number, dtype)
            == 2 * _apart(zero, number, dtype)
            == 2 * _apart(-zero, number, dtype)
        )
        assert (_apart(number, zero, dtype) == 0) == (float(number[0]) == 0.0)


@pytest.mark.parametrize(
    ("one", "other", "dtype", "apart"),
    [
        (1.0, 1.0 + 2**-23, "float32", 1),
        (1.0, 2.0, "float32", 2**23),
        (1.0, 2.0, "float64", 2**52),
        (1.0, 2.0, "float16", 2**10),
        (1.0, 2.0, "bfloat16", 2**7),
        (0.0, -0.0, "float32", 0),
        (0.0, 1e-45, "float32", 1),
        (-1e-45, 1e-45, "float32", 2),
        (3.4028235e38, np.inf, "float32", 1),
        (-np.inf, np.inf, "float64", 2 * 0x7FF0000000000000),
        (np.nan, np.inf, "float64", NEVER),
        (np.nan, -np.nan, "float32", 0),
    ],
)
def test_distances(one: float, other: float, dtype: str, apart: int) -> None:
    """Of numbers whose places are known."""
    held = "float32" if dtype == "bfloat16" else dtype
    assert _apart(np.array([one], held), np.array([other], held), dtype) == apart


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_arrays_of_any_shape(values: Any) -> None:
    """A distance per number; views with gaps are taken as they look."""
    distances = ulps(values, values)
    assert (distances.shape, distances.dtype, distances.sum()) == (values.shape, np.uint64, 0)
    assert (ulps(values.T, values.T.copy()) == 0).all()


@pytest.mark.parametrize(
    ("one", "other", "dtype", "reason"),
    [
        (np.zeros(2, np.float32), np.zeros(3, np.float32), None, "not compared number by number"),
        (np.zeros(2, np.float32), np.zeros(2), None, "not compared number by number"),
        (np.zeros(2, np.int32), np.zeros(2, np.int32), None, "no distance in int32"),
        (np.zeros(2), np.zeros(2), "float32", "no distance in float32 of arrays of float64"),
        (np.zeros(2), np.zeros(2), "bfloat16", "no distance in bfloat16 of arrays of float64"),
    ],
)
def test_what_is_not_compared(one: Any, other: Any, dtype: str | None, reason: str) -> None:
    """Two shapes or types, and a type that has no such distance."""
    with pytest.raises(ValueError, match=reason):
        ulps(one, other, dtype)
