"""Where a catalog may be: in the store's folder, or where the operator's settings allow it."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from rollbook.store.allowed import allows_folder, allows_host, remedy
from rollbook.store.errors import CatalogError, OutsideError
from rollbook.store.inside import refuse_no_plain

URL_VARIABLE = "ROLLBOOK_CATALOG_URL"
DEFAULT = "catalog.db"
"""The SQLite file of a store that names no other."""
_DRIVERS = ("sqlite", "sqlite+pysqlite")
_HARMLESS = {"host", "port", "sslmode", "connect_timeout", "application_name", "target_session_attrs"}
"""Query parameters of a PostgreSQL URL that name neither a local file nor a server other than `host`."""


def parse_url(text: str) -> URL:
    """The URL of a catalog.

    Raises:
        CatalogError: it is none. The message leaves the text out: it may hold a password.
    """
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        raise CatalogError(
            "the catalog's URL is not a SQLAlchemy URL such as postgresql+psycopg://user@host/database: mend "
            "[catalog] url in store.toml, or ROLLBOOK_CATALOG_URL"
        ) from None


def refuse_outside(url: URL, store: Path) -> None:
    """See that a URL of `store.toml` names a SQLite file in the store, or a server that is allowed.

    Raises:
        CatalogError: it does not.
    """
    if url.drivername in _DRIVERS:
        _refuse_file(url, store)
        return
    if url.get_backend_name() != "postgresql":
        raise _refused(url, "use SQLite, or PostgreSQL")
    if strange := sorted(set(url.query) - _HARMLESS):
        raise _refused(url, f"a store's own settings may not set {strange[0]!r}")
    for host in _hosts(url):
        if not (allows_folder(host) if host.startswith("/") else allows_host(host, url.port)):
            raise _refused(url, f"it would connect you to {host!r}; {remedy(host)}")


def _refuse_file(url: URL, store: Path) -> None:
    file = url.database or ""
    if url.query or not file or file.startswith((":", "file:")):
        raise _refused(url, "its settings may name no more than a file, such as sqlite:///catalog.db")
    folder = os.path.realpath((store / file).parent)
    if not Path(folder).is_relative_to(store.resolve()) and not allows_folder(folder):
        raise _refused(url, f"{file!r} is not in the store's folder; {remedy(folder)}")


def _hosts(url: URL) -> list[str]:
    """The servers of a PostgreSQL URL, or the folders of their sockets; this host if the URL names none."""
    listed = url.query.get("host", ())
    named = [url.host or "", *([listed] if isinstance(listed, str) else listed)]
    hosts = [host for several in named if several for host in several.split(",")]
    # host:port is one of several ways to name a port; an address with several colons contains no port.
    return [host.split(":")[0] if host.count(":") == 1 else host for host in hosts or ["localhost"]]


def _refused(url: URL, why: str) -> CatalogError:
    return CatalogError(
        f"the catalog that store.toml names ({url.get_backend_name()}) is not opened: {why}; or give the "
        f"whole URL in {URL_VARIABLE}; nothing in the log depends on it"
    )


def look_at_files(file: Path) -> None:
    """Check that the paths SQLite will open are plain files or absent.

    Raises:
        CatalogError: one of them is a link, a pipe or the like.
    """
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            refuse_no_plain(file.with_name(file.name + suffix))
    except OutsideError as error:
        raise CatalogError(f"the catalog is not opened: {error}") from error
