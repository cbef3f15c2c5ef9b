"""How far two floating-point numbers lie apart, in numbers of their type."""

from __future__ import annotations

import numpy as np

_INTEGERS = {4: np.int32, 8: np.int64}


def ulps(first: np.floating, second: np.floating) -> int:
    """How many steps from one number of their type to the next lead from one to the other."""
    return abs(_place(first) - _place(second))


def _place(value: np.floating) -> int:
    bits = int(np.asarray(value).view(_INTEGERS[value.dtype.itemsize]))
    lowest = -(1 << (8 * value.dtype.itemsize - 1))
    return bits if bits >= 0 else lowest - bits
