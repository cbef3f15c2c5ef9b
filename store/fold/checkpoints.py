"""Which checkpoints of a run are there: those that were written and not removed since. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.store.events import CheckpointRemoved, CheckpointWritten, Event


def held_and_removed(events: Iterable[Event]) -> tuple[list[CheckpointWritten], list[CheckpointRemoved]]:
    """The checkpoints of one run that are there, and the removals of those that are not.

    Args:
        events: `checkpoint.written` and `checkpoint.removed`, each lane in order; others are passed over.
    """
    at: dict[str, list[Event]] = {}
    written: list[tuple[Event, CheckpointWritten]] = []
    for event in events:
        if isinstance(event.record, CheckpointWritten):
            written.append((event, event.record))
        if isinstance(event.record, CheckpointWritten | CheckpointRemoved):
            at.setdefault(event.record.path, []).append(event)
    held = [(event, record) for event, record in written if not _removed_since(event, at[record.path])]
    there = {record.path for _, record in held}
    last = {path: _last_removal(here) for path, here in at.items() if path not in there}
    return [record for _, record in held], [removed for removed in last.values() if removed is not None]


def _removed_since(written: Event, here: list[Event]) -> bool:
    """Whether what was written was removed after that: within a lane by its order, across lanes by ids."""
    place = here.index(written)
    return any(
        isinstance(e.record, CheckpointRemoved)
        and (i > place if e.lane == written.lane else e.event_id > written.event_id)
        for i, e in enumerate(here)
    )


def _last_removal(here: list[Event]) -> CheckpointRemoved | None:
    return next((e.record for e in reversed(here) if isinstance(e.record, CheckpointRemoved)), None)


def removed_said(removed: CheckpointRemoved) -> str:
    """A sentence that says that a checkpoint was removed, and the remedy."""
    version = removed.policy_version
    return (
        f"The checkpoint of version {version} was removed ({removed.reason}): `rollbook replay weights "
        f"{version}` makes its weights again"
    )
