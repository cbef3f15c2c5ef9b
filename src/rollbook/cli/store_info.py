"""What `rollbook store info` prints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from rollbook.cli.table import print_table
from rollbook.cli.terminal import Console, print_json
from rollbook.store.catalog.catalog import Catalog
from rollbook.store.cut import format_cut
from rollbook.store.errors import CatalogError
from rollbook.store.open import open_store


def print_info(store: Path, as_json: bool) -> None:
    """Print the state of the lanes, from their files and from the catalog."""
    log = open_store(store)
    info: dict[str, Any] = {"path": str(log.path), "id": log.store_id, "head": format_cut(log.head())}
    tables: dict[str, list[dict[str, Any]]] = {}
    try:
        with contextlib.closing(Catalog.of(log.path)) as catalog:
            tables = catalog.rows()
            info["catalog"] = catalog.name
    except (CatalogError, SQLAlchemyError) as error:  # a backup, a full disk: the lanes' files say the most
        info["catalog"] = f"not read: {error}"
    if as_json:
        print_json(info | tables)
        return
    console = Console()
    console.print(
        f"store    {info['id']} at {info['path']}\nhead     {info['head']}\ncatalog  {info['catalog']}",
        soft_wrap=True,
    )
    for name, rows in tables.items():
        if rows and name != "store_meta":
            console.tell("\n", (name, "bold"))
            print_table(list(rows[0]), [tuple(row.values()) for row in rows])
