"""Which experts the tokens of a sample were routed to, as recorded by the turns of its path, and
whether a model can replay that. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from cachetools import LRUCache

from rollbook.store.events import Json
from rollbook.store.events.routed_experts import ExpertIds, unpack

FREE = -1
"""In the place of every expert of a position and layer: the router chooses for itself."""
REMEMBERED = 65_536
"""Turns of which it is remembered whether their records fit."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A model's mixture of experts: in each of its `layers` a token goes to `topk` of `experts`
    experts."""

    layers: int
    experts: int
    topk: int


class Recorded(Protocol):
    """A path and the routing that its turns record: see `Sample`."""

    @property
    def turn_ids(self) -> tuple[str, ...]: ...
    @property
    def turn_ends(self) -> tuple[int, ...]: ...
    @property
    def routed(self) -> dict[str, Json]: ...
    @property
    def length(self) -> int: ...


def experts_of(path: Recorded, mixture: Mixture) -> ExpertIds:
    """The experts of every position of a path, int16 [T, layers, topk]; `FREE` where no turn
    records them.

    Those of the token that was sampled last are unknown. Where two turns record a position, the
    earlier one's count: what was sampled after it was sampled with these.

    Args:
        path: whose records fit the mixture.
    """
    experts = np.full((path.length, mixture.layers, mixture.topk), FREE, np.int16)
    for stored in reversed(path.routed.values()):
        start = min(stored["start"], path.length)
        ids = unpack(stored)[: path.length - start]
        experts[start : start + len(ids)] = ids
    return experts


def misfit(stored: Json, end: int, mixture: Mixture) -> str:
    """Why a model cannot replay what a turn records; empty if it can.

    Args:
        stored: `routed_experts` of the turn.
        end: where the turn's tokens end in its path.
    """
    shape = stored.get("shape")
    if isinstance(shape, list) and shape[1:] != [mixture.layers, mixture.topk]:
        recorded = " of ".join(map(str, shape[1:]))
        return (
            f"layers and experts of a token: {recorded}, where the model has {mixture.layers} of "
            f"{mixture.topk}"
        )
    try:
        ids, start = unpack(stored), stored.get("start")
    except ValueError as error:
        return str(error)
    if not isinstance(start, int) or start < 0 or start + len(ids) > end:
        return f"{len(ids)} positions from {start} on, of a turn that ends before {end}"
    if (highest := int(ids.max(initial=0))) >= mixture.experts:
        return f"expert {highest}, where the model has {mixture.experts}"
    in_order = np.sort(ids, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        return "one expert twice at a position of a layer"
    return ""


class FitCheck:
    """Checks whether a model can replay what turns record, and caches the result, since that takes
    decoding."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._known: LRUCache[str, str] = LRUCache(REMEMBERED)

    def of_turn(self, turn_id: str, stored: Json, end: int) -> str:
        """As `misfit`, with the turn's id in front."""
        if turn_id not in self._known:
            why = misfit(stored, end, self._mixture)
            self._known[turn_id] = f"turn {turn_id}: {why}" if why else ""
        return self._known[turn_id]

    def of_path(self, path: Recorded) -> str:
        """The first misfit among the turns of a path; empty if all fit."""
        ends: Sequence[tuple[str, int]] = list(zip(path.turn_ids, path.turn_ends, strict=True))
        misfits: Any = (self.of_turn(t, path.routed[t], end) for t, end in ends if t in path.routed)
        return next(filter(None, misfits), "")
