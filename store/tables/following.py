"""Has a store's tables follow its units, where `store.toml` says that they are to."""

from __future__ import annotations

import logging

from rollbook.store.log.store import Store

logger = logging.getLogger(__name__)


def follow_or_warn(log: Store) -> None:
    """Publish where `[iceberg] publish` says so. Tables are derived, so a failure stops nothing: the sealer's
    next pass catches up."""
    if why := follow(log):
        logger.warning("%s", why)


def follow(log: Store) -> str | None:
    """The same; why that failed, else None."""
    if not log.settings().iceberg.publish:
        return None
    try:
        # pyiceberg takes a second to import, which only stores with tables wait for.
        from rollbook.store.tables.publish import publish_tables

        publish_tables(log)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        why = f"{name} is not installed: pip install 'rollbook[iceberg]'"
    except Exception as error:  # pyiceberg's have no base of their own
        why = str(error)
    else:
        return None
    return f"tables are behind until the next pass: {why}"
