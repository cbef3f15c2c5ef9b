"""Numbers for names: groups and trajectories are numbered once, where samples come from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

NO_GROUP = -1
"""Stands for the group of a sample that has none."""


def numbered(names: Sequence[str | None] | pa.StringArray) -> npt.NDArray[np.int64]:
    """A number from 0 for each distinct name, in the order of first occurrence, [N]; `NO_GROUP` for None."""
    column = names if isinstance(names, pa.Array) else pa.array(names, pa.string())
    codes = column.dictionary_encode().indices.fill_null(NO_GROUP)
    return np.asarray(codes.to_numpy(zero_copy_only=False), np.int64)
