"""A relational database that lists what the store holds.

In: units, lanes, checkpoints as they are written. Out: tables for people and other hosts; it is derived from
the files, and no answer depends on it.
"""

from rollbook.store.catalog.catalog import Catalog

__all__ = ["Catalog"]
