"""Reads trajectories of a store as tapes."""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.replay.cassettes.tape import Tape, tape_of
from rollbook.store.cut import Cut
from rollbook.store.errors import ReplayError
from rollbook.store.events import TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.fold.trajectory import fold
from rollbook.store.log.store import Store


def read_tapes(log: Store, cut: Cut, ids: Sequence[str]) -> list[Tape]:
    """The trajectories of these ids as they were at a cut, in this order.

    Raises:
        ReplayError: one is not held there, or none of them holds a request.
        CorruptionError: a file that may hold one is damaged.
    """
    events = log.events_about(ids, cut)
    begins: dict[str, int] = {}
    times: dict[str, tuple[int, int]] = {}
    for event in events:
        match event.record:
            case TurnRequested(turn_id=turn_id):
                begins[turn_id] = event.time_us
            case TurnCompleted(turn_id=turn_id) | TurnFailed(turn_id=turn_id):
                times[turn_id] = (begins.get(turn_id, event.time_us), event.time_us)
    folded = fold(events)
    missing = [one for one in ids if one not in folded]
    if missing:
        raise ReplayError(
            f"no trajectory {missing[0]!r} at that cut; list them: "
            "rollbook sql 'select trajectory_id, trajectory from trajectories'"
        )
    tapes = [tape_of(folded[one], times) for one in dict.fromkeys(ids)]
    if not any(tape.requests for tape in tapes):
        raise ReplayError("the trajectories hold no request yet: there is nothing to answer from")
    return tapes
