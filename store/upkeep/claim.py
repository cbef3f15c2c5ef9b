"""A claim that lets one process at a time change the store's sealed units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rollbook.store.errors import UpkeepError
from rollbook.store.log.store import Store
from rollbook.store.sealed.unit import current_units

CLAIM = "sealing"
"""Name of the `Store.claim` for changing sealed units: by the sealer, retention or erasure."""
PATIENCE_S = 60.0
"""How long to wait for the sealer to end its pass."""


@contextlib.contextmanager
def only_one(log: Store) -> Iterator[None]:
    """Hold the claim to change the store's sealed units.

    Raises:
        LaneLockedError: another one does, and went on for `PATIENCE_S` seconds.
        UpkeepError: the store only reads what another one uploaded.
    """
    units = (unit for lane in log.lanes() for unit in current_units(log.path, lane))
    if log.settings().remote.uri is None and any(unit.remote is not None for unit in units):
        raise UpkeepError(
            f"{log.path} only reads what is in object storage: do this where it is written; or, if this is "
            "to be that store from now on and no other, set [remote] uri in store.toml"
        )
    with log.claim(CLAIM, "try again when it is done", PATIENCE_S):
        yield
