"""A relational database that lists what the store holds. It is derived from the files; no answer depends on
it.
"""

from rollbook.store.catalog.catalog import Catalog

__all__ = ["Catalog"]
