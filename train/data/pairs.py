"""Pairs of samples from recorded preferences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.store.events import PreferenceAdded

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """What became of preferences.

    Attributes:
        pairs: int64 [P, 2], numbers of the chosen and the rejected sample; in the order of first record.
        margins: float64 [P], as first recorded; NaN where none was.
        alone: samples that are kept, and in preferences whose other side is not, in ascending order.
        named: ids of all trajectories that preferences name.
    """

    pairs: Ints
    margins: npt.NDArray[np.float64]
    alone: Ints
    named: frozenset[str]


def paired(preferences: Iterable[PreferenceAdded], kept: Mapping[str, int]) -> Paired:
    """Pairs of samples whose two sides are kept. A preference that was recorded twice counts once.

    Args:
        kept: trajectory -> number of its only sample.
    """
    pairs: dict[tuple[int, int], float | None] = {}
    named, alone = set[str](), set[int]()
    for one in preferences:
        ids = (one.trajectory_id, one.rejected_trajectory_id)
        named.update(ids)
        sides = [kept[i] for i in ids if i in kept]
        if len(sides) == 2:
            pairs.setdefault((sides[0], sides[1]), one.margin)
        else:
            alone.update(sides)
    alone -= {side for pair in pairs for side in pair}
    return Paired(
        np.array(list(pairs), np.int64).reshape(-1, 2),
        np.array([np.nan if margin is None else margin for margin in pairs.values()], np.float64),
        np.array(sorted(alone), np.int64),
        frozenset(named),
    )
