"""The envelope that every event travels in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollbook.store.events.about import RECORDS, About, Record
from rollbook.store.ids import new_id, now_us


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A record in its envelope. `lane` and `seq` are empty until the event is appended."""

    record: Record
    run: str
    event_id: str = field(default_factory=new_id)
    time_us: int = field(default_factory=now_us)
    lane: str = ""
    seq: int = -1

    @property
    def kind(self) -> str:
        """The record's kind, as stored."""
        return self.record.KIND


def about(kind: str) -> About:
    """The properties of a kind; the defaults for a kind that this release does not know."""
    record = RECORDS.get(kind)
    return About() if record is None else record.ABOUT


def kinds_where(predicate: Callable[[About], object]) -> list[str]:
    """The kinds whose `About` fulfils a predicate."""
    return [kind for kind, record in RECORDS.items() if predicate(record.ABOUT)]
