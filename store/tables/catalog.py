"""The tables in the catalog's database: found, made, and refused where they are another store's.

A store may be anybody's, and properties of a table can name code to import and files to remove. So the
files of a table are opened by ours alone, and its properties become ours before anything is done with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.table import Table
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from rollbook.store.catalog.catalog import Catalog, catalog_url
from rollbook.store.catalog.database import PATIENCE_S, without_secrets
from rollbook.store.errors import CatalogError, ConfigError, OutsideError, StoreError
from rollbook.store.hosts.host import host_name
from rollbook.store.log.store import Store
from rollbook.store.sealed.derived import SCALARS
from rollbook.store.sealed.remote import outage_explained, remote_folder
from rollbook.store.tables.definitions import (
    COLUMNS,
    FILES,
    NAME_MAPPING,
    NAMESPACE,
    STORE,
    TableDefinition,
    properties_of,
)
from rollbook.store.tables.files import FOLDER, STORE_FOLDER, StoreFiles

logger = logging.getLogger(__name__)


class TableCatalog(SqlCatalog):
    """pyiceberg's catalog, of one store's tables, in the database of the store's own catalog.

    Args:
        folder: the store's, without links.

    Attributes:
        shown: the database's URL, without a password.
        beside: whether it is a file in the store's folder.
        several: whether several hosts write the store. Each then publishes the units of its own lanes, once
            they are in object storage, and leaves those of others in the tables.
        files_property: of a snapshot, the digest of the files that this host published.
    """

    def __init__(self, log: Store, folder: Path, url: URL) -> None:
        self.log = log
        self.folder = folder
        self.several = log.settings().medium.url is not None
        self.files_property = f"{FILES}.{host_name(log.path)}" if self.several else FILES
        self.files = StoreFiles({STORE_FOLDER: str(folder)})
        self.shown = without_secrets(url)
        self.beside = url.get_backend_name() == "sqlite" and Path(str(url.database)).is_relative_to(log.path)
        if url.get_backend_name() == "sqlite":
            url = url.update_query_dict({"timeout": str(PATIENCE_S)})
        super().__init__(
            NAMESPACE,
            uri=url.render_as_string(hide_password=False),
            **{"py-io-impl": f"{StoreFiles.__module__}.{StoreFiles.__name__}", STORE_FOLDER: str(folder)},
        )

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        # Not public: pyiceberg would have a table's properties say which class opens its files.
        return self.files


@contextlib.contextmanager
def open_tables(log: Store) -> Iterator[TableCatalog]:
    """Context: the catalog of the store's tables.

    Raises:
        CatalogError: the database cannot be reached or used, or is the catalog of another store, or of one of
            several hosts alone.
    """
    Catalog.of(log.path).close()  # says so where the database is out of reach, or another store's
    url = catalog_url(log.path)
    try:
        with contextlib.closing(TableCatalog(log, log.path.resolve(), url)) as catalog:
            if catalog.several and (catalog.beside or log.settings().remote.uri is None):
                raise CatalogError(
                    f"{log.path} is one of several hosts ([medium] url), whose tables are in one catalog and "
                    "name what is in object storage: set [catalog] url to PostgreSQL, and [remote] uri"
                )
            catalog.create_namespace_if_not_exists(NAMESPACE)
            yield catalog
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise CatalogError(
            f"catalog {without_secrets(url)}: {cause}: see that it can be reached and written; what was "
            "published before stays, and the next call goes on"
        ) from error


def is_damage(error: Exception) -> bool:
    """Whether reading a table's metadata failed because that is gone or damaged, of which pyiceberg raises
    whatever it stumbles over; and not because a database, a disk or a service did not answer."""
    if isinstance(error, FileNotFoundError | OutsideError):
        return True
    return not isinstance(error, OSError | StoreError | ConfigError | SQLAlchemyError)


def metadata_folders(catalog: TableCatalog, definition: TableDefinition) -> list[str]:
    """Where a table's metadata is kept, and behind that where it may have been: object storage once its
    files go there, the store's folder before. Scalars always stay here."""
    uri = catalog.log.settings().remote.uri
    bases = [str(catalog.folder)]
    if uri is not None and definition.file != SCALARS:
        bases.insert(0, remote_folder(uri, catalog.log.store_id))
    return [f"{base}/{FOLDER}/{definition.name}/metadata" for base in bases]


def find_table(catalog: TableCatalog, definition: TableDefinition, *, anew: bool) -> Table:
    """The table, made where there is none that can be read.

    Args:
        anew: make it in place of any that is there.

    Raises:
        CatalogError: the catalog has it of another store, or of another copy of this one.
        RemoteError: object storage does not answer or refuses.
    """
    folder = metadata_folders(catalog, definition)[0]
    properties = properties_of(definition, catalog.log.store_id, folder)
    properties[NAME_MAPPING] = pyarrow_to_schema(definition.schema).name_mapping.model_dump_json()
    name = name_of(definition)
    table = None
    if not anew:
        table = _loaded(catalog, name, lambda: catalog.load_table(name)) or _recovered(catalog, name, folder)
    if table is not None and table.properties.get(COLUMNS) == properties[COLUMNS]:
        return _settled(table, properties)
    _forget(catalog, name)
    location = folder.removesuffix("/metadata")
    with outage_explained(folder, catalog.log.settings().remote):
        return catalog.create_table(name, definition.schema, location, properties=properties)


def name_of(definition: TableDefinition) -> str:
    """Name of a table in the catalog."""
    return f"{NAMESPACE}.{definition.name}"


def _forget(catalog: TableCatalog, name: str) -> None:
    with contextlib.suppress(NoSuchTableError):
        catalog.drop_table(name)


def _loaded(catalog: TableCatalog, name: str, load: Callable[[], Table]) -> Table | None:
    """The table; None where there is none, or where what it is loaded from is gone or damaged.

    Raises:
        CatalogError, RemoteError: as `find_table`.
    """
    try:
        with outage_explained(name, catalog.log.settings().remote):
            table = load()
    except NoSuchTableError:
        return None
    except OutsideError as error:
        if catalog.beside:  # the store's folder was moved or copied, and the catalog in it came along
            return None
        raise CatalogError(
            f"catalog {catalog.shown} has {name} of another copy of this store, or of this one before it was "
            f"moved ({error}): if these are the files that count, run `rollbook store publish --anew`; "
            "otherwise give this copy a catalog of its own ([catalog] url in store.toml)"
        ) from error
    except Exception as error:
        if not is_damage(error):
            raise
        logger.warning("%s cannot be read and is made anew: %s", name, error)
        return None
    if (owner := table.properties.get(STORE)) != catalog.log.store_id:
        whose = f"store {owner}" if owner else "somebody else"
        raise CatalogError(
            f"catalog {catalog.shown} has a table {name} of {whose}: "
            "give this store a catalog of its own ([catalog] url in store.toml, or ROLLBOOK_CATALOG_URL)"
        )
    return table


def _recovered(catalog: TableCatalog, name: str, folder: str) -> Table | None:
    """The table by its newest metadata, where the catalog was lost; None where there is none."""
    names = [file for file in catalog.files.names_in(folder) if file.endswith(".metadata.json")]
    if not names:
        return None
    newest = max(names, key=lambda file: (len(file), file))
    _forget(catalog, name)
    return _loaded(catalog, name, lambda: catalog.register_table(name, f"{folder}/{newest}"))


def _settled(table: Table, properties: dict[str, str]) -> Table:
    """The table with these properties and no others."""
    if table.properties != properties:
        with table.transaction() as change:
            change.set_properties(properties)
            if others := table.properties.keys() - properties.keys():
                change.remove_properties(*others)
    return table
