"""A cut names a prefix of each lane: `serve=120,train=45` is the first 120 events of `serve` and 45 of
`train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rollbook.store.errors import CutError

Cut = Mapping[str, int]
"""Lane -> number of its events that the cut holds. An absent lane is empty."""

LANE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_COUNT = re.compile(r"[0-9]{1,18}")


def format_cut(cut: Cut) -> str:
    """The canonical text of a cut: sorted lanes, empty ones left out, `empty` when nothing is held."""
    return ",".join(f"{lane}={count}" for lane, count in sorted(cut.items()) if count) or "empty"


def check_held(cut: Cut, head: Cut, ended: Callable[[str], bool] = lambda lane: False) -> None:
    """See that a store with this head holds a cut.

    Args:
        ended: whether a lane may hold fewer events than were read.

    Raises:
        CutError: it holds fewer of another lane.
    """
    for lane, count in cut.items():
        if count > head.get(lane, 0) and not ended(lane):
            raise CutError(
                f"cut {format_cut(cut)!r} holds {count} events of lane {lane!r}, but the store has "
                f"{head.get(lane, 0)}"
            )


def parse_cut(text: str) -> dict[str, int]:
    """The inverse of `format_cut`.

    Raises:
        CutError: the text is not `lane=count,lane=count`.
    """
    if text == "empty":
        return {}
    cut: dict[str, int] = {}
    for part in text.split(","):
        lane, sep, count = part.strip().partition("=")
        if not sep or not LANE_NAME.fullmatch(lane) or not _COUNT.fullmatch(count) or lane in cut:
            raise CutError(
                f"cut {text!r}: {part!r} is not lane=count; write e.g. serve=120,train=45, "
                "step:N for the cut step N was planned at, or head"
            )
        cut[lane] = int(count)
    return cut


def holds(cut: Cut, lane: str, seq: int) -> bool:
    """Whether the event at (lane, seq) lies inside the cut."""
    return seq < cut.get(lane, 0)
