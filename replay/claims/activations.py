"""Which engines said that they serve a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollbook.store import Store
from rollbook.store.events import Event, PolicyActivated

Activated = tuple[Event, PolicyActivated]


def activations(log: Store, run: str, policy: str) -> Mapping[int, Sequence[Activated]]:
    """The events that say that an engine serves a version of a policy, by version; their ids sort by time,
    across lanes too.

    Raises:
        CorruptionError: the log is damaged.
    """
    by_version: dict[int, list[Activated]] = {}
    for event in log.events_of([PolicyActivated.KIND]):
        record = event.record
        if event.run == run and isinstance(record, PolicyActivated) and record.policy == policy:
            by_version.setdefault(record.policy_version, []).append((event, record))
    return {
        version: sorted(activated, key=lambda pair: pair[0].event_id)
        for version, activated in by_version.items()
    }
