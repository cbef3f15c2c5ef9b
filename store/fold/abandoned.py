"""Which policy versions are on no line any more, since training went back to one before them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.store.events import StepAbandoned


def gone_versions(abandoned: Iterable[StepAbandoned]) -> set[int]:
    """Versions that abandoned steps made, and numbers under which training went on from such a one."""
    records = list(abandoned)
    gone = {record.policy_version for record in records}
    for back_to, goes_on_as in sorted({(r.back_to, r.goes_on_as) for r in records}):
        if back_to in gone:  # the number is higher: whatever went back to it comes later in this order
            gone.add(goes_on_as)
    return gone
