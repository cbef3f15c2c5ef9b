"""A store that is made in the medium, under an id that its hosts know beforehand.

Where hosts are described before any of them runs, none can be told an id that the first one makes. They are
told one, and whoever comes first makes the store.
"""

from __future__ import annotations

from rollbook.store.marker import new_marker
from rollbook.store.medium.medium import STORE
from rollbook.store.medium.open import opened_medium, store_address
from rollbook.store.settings import MediumSettings


def create(url: str, settings: MediumSettings) -> bool:
    """Make the store at `url`, such as s3://bucket/prefix/STORE-ID, if none is there; whether it was made.

    Several hosts may do so at once: the marker of one of them counts.

    Args:
        settings: all but the address, which goes without the store's id.

    Raises:
        ConfigError: the address, or the id at its end, cannot be used.
        MediumError: the medium does not answer or refuses.
    """
    own, store_id = store_address(url, settings)
    marker = new_marker(store_id)
    medium = opened_medium(own, store_id)
    try:
        return not medium.read(STORE, 0) and medium.put(STORE, 0, marker)
    finally:
        medium.close()
