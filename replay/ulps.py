"""How far two numbers lie apart, counted in the numbers between them: units in the last place. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ulps = npt.NDArray[np.uint64]

NEVER = 2**64 - 1
"""The distance of a number from what is none (NaN)."""

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def ulps(one: Floats, other: Floats, dtype: str | None = None) -> Ulps:
    """By how many steps from one number to the next each pair lies apart; uint64, of the arrays' shape.

    0.0 and -0.0 are one number, and so are all NaN. Infinity is the number after the largest.

    Args:
        one, other: arrays of one shape and type.
        dtype: float64, float32, float16 or bfloat16; None: that of the arrays. Numbers of bfloat16 come as
            float32, which has all of them.

    Raises:
        ValueError: the arrays have two types or shapes, or a type that is none of these.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        raise ValueError(
            f"{one.dtype} {one.shape} and {other.dtype} {other.shape} are not compared number by number"
        )
    name = dtype or str(one.dtype)
    if name not in _BITS or (name if name != "bfloat16" else "float32") != str(one.dtype):
        raise ValueError(f"no distance in {name} of arrays of {one.dtype}: choose of {', '.join(_BITS)}")
    first, second = _places(one, name), _places(other, name)
    apart = np.where(first > second, first - second, second - first)
    missing = np.isnan(one), np.isnan(other)
    apart[missing[0] != missing[1]] = NEVER
    apart[missing[0] & missing[1]] = 0
    return apart


def _places(values: Floats, name: str) -> Ulps:
    """The place of each in the order of all numbers of the type, from the lowest on."""
    width = values.dtype.itemsize * 8
    bits = np.ascontiguousarray(values).view(f"u{width // 8}").astype(np.uint64)
    bits >>= np.uint64(width - _BITS[name])
    half = np.uint64(1 << (_BITS[name] - 1))
    return np.where(bits >= half, half - (bits - half), half + bits).reshape(values.shape)
