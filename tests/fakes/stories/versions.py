"""What a whole log binds policy versions to."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.store import Event
from rollbook.store.fold.versions import VersionDigests


def fold_versions(events: Iterable[Event]) -> VersionDigests:
    """The digests that events bind versions to."""
    folded = VersionDigests()
    for event in events:
        folded.add(event)
    return folded
