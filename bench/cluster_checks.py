"""What must hold of a log of several hosts, whichever of them ended or was lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.store.events import Event, EventOrphaned, TrajectoryFinished, TrajectoryOpened, TurnCompleted


@dataclass(frozen=True, slots=True)
class Seen:
    """What clients were told.

    Attributes:
        answered: (trajectory's name, turn's id, text, when) of each reply that came whole.
        finished: (trajectory's name, when) of each finish that was acknowledged.
    """

    answered: Sequence[tuple[str, str, str, float]]
    finished: Sequence[tuple[str, float]]


@dataclass(slots=True)
class Account:
    """Where all of it is.

    Attributes:
        lost: (what, when it was acknowledged) of what is nowhere.
        doubled, changed: what is there more than once, or in other words.
        orphaned: how much of it is in events that were orphaned.
    """

    lost: list[tuple[str, float]] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    orphaned: int = 0


def account(events: Sequence[Event], seen: Seen) -> Account:
    """Where all is that clients were told."""
    result = Account(doubled=list(_doubled(events)))
    names = {e.record.trajectory_id: e.record.name for e in events if isinstance(e.record, TrajectoryOpened)}
    orphans = [e.record.event for e in events if isinstance(e.record, EventOrphaned)]
    turns = {
        e.record.turn_id: (names.get(e.record.trajectory_id), str(e.record.reply.get("content") or ""))
        for e in events
        if isinstance(e.record, TurnCompleted)
    }
    orphaned_turns = {o.get("turn_id") for o in orphans if o.get("kind") == TurnCompleted.KIND}
    for name, turn_id, text, when in seen.answered:
        if turn_id in turns:
            if turns[turn_id] != (name, text):
                result.changed.append(f"{name}, turn {turn_id}: told {text!r}, logged {turns[turn_id]}")
        elif turn_id in orphaned_turns:
            result.orphaned += 1
        else:
            result.lost.append((f"the reply of turn {turn_id} of {name}", when))
    ends = [e.record for e in events if isinstance(e.record, TrajectoryFinished)]
    ended = {names.get(end.trajectory_id) for end in ends if end.status != "aborted"}
    orphaned_ends = Counter(o.get("kind") for o in orphans)[TrajectoryFinished.KIND]
    for name, when in seen.finished:
        if name not in ended:
            result.lost.append((f"the finish of {name}", when))
    # Of an end that was orphaned the trajectory's name may be orphaned as well.
    if orphaned_ends:
        known = _orphaned_ends(orphans, names)
        left = [
            (what, when) for what, when in result.lost if what.removeprefix("the finish of ") not in known
        ]
        result.orphaned += len(result.lost) - len(left)
        result.lost = left
    return result


def _orphaned_ends(orphans: Sequence[dict[str, Any]], names: dict[str, str]) -> set[str | None]:
    opened = {o["trajectory_id"]: o["name"] for o in orphans if o.get("kind") == TrajectoryOpened.KIND}
    known = names | opened
    return {known.get(o["trajectory_id"]) for o in orphans if o.get("kind") == TrajectoryFinished.KIND}


def _doubled(events: Sequence[Event]) -> Iterator[str]:
    """Events, turns and ends that are there twice."""
    counts = {
        "event": Counter(e.event_id for e in events),
        "completed turn": Counter(e.record.turn_id for e in events if isinstance(e.record, TurnCompleted)),
        "end of trajectory": Counter(
            e.record.trajectory_id for e in events if isinstance(e.record, TrajectoryFinished)
        ),
    }
    for what, counted in counts.items():
        for name, count in counted.items():
            if count > 1:
                yield f"{what} {name} is there {count} times"
