"""One SQL view as data, and how a field of `extra` is written in SQL. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.store.sql.columns import ViewColumn


@dataclass(frozen=True, slots=True)
class View:
    """A view: its name, one sentence on its rows, its SQL, and what each column means."""

    name: str
    doc: str
    sql: str
    columns: tuple[ViewColumn, ...]


def text(field: str, of: str = "") -> str:
    """A field of `extra` as text; `of` is the relation's alias."""
    return f"json_extract_string({of and of + '.'}extra, '$.{field}')"


def json(field: str, of: str = "") -> str:
    """A field of `extra` as JSON."""
    return f"json_extract({of and of + '.'}extra, '$.{field}')"
