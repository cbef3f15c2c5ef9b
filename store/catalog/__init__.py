"""What the store holds, in a relational database: derived from the files, never needed for a right answer."""

from rollbook.store.catalog.catalog import Catalog

__all__ = ["Catalog"]
