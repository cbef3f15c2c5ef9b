"""What a query names of `turns` decides what is read for it. Pure, but for asking DuckDB's parser.

Most columns of `turns` are a turn's scalars, kept ready. Those that are large stand in the fat events, and
are joined. DuckDB 2.0 leaves a join that no column needs out of a query that aggregates, and of no other, and
pushes neither a limit nor most conditions below it: three rows of a million would read all of them. So the
view is put into a query as far as the query names its columns; and a query for few turns is asked in two:
first which they are, by scalars alone, and then as it stands, of those turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import orjson

from rollbook.store.sql.agent_views import DETAILED, NAMED, REWARDED, TURNS, turns_query
from rollbook.store.sql.columns import literal

MOST_TURNS = 1000
"""A query for more turns is not asked in two: the second one names each."""

_NAMES = re.compile(rf"\b{TURNS.name}\b", re.IGNORECASE)
_EXPLAIN = re.compile(r"\s*explain(?:\s+analyze)?\s+", re.IGNORECASE)
_JOINED = NAMED | REWARDED | DETAILED
_ROW_BY_ROW = {
    *("COLUMN_REF", "STAR", "CONSTANT", "CAST", "COMPARISON", "CONJUNCTION", "OPERATOR", "CASE", "BETWEEN"),
    "FUNCTION",
}
"""Classes of expressions that make one value of each row, where a function is a scalar one."""
_IDS = [
    {"class": "COLUMN_REF", "type": "COLUMN_REF", "alias": "", "column_names": [name]}
    for name in ("trajectory_id", "turn_id")
]
_AFTER_ROWS: Mapping[str, Any] = {
    **{"group_expressions": [], "group_sets": [], "having": None, "qualify": None, "sample": None},
    "aggregate_handling": "STANDARD_HANDLING",
}
"""What a query does with the rows that its condition lets through."""
Parsed = dict[str, Any]
"""A part of what DuckDB's parser makes of a query."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A query of others that names `turns`.

    Attributes:
        places: where the view is named, as [begin, end) of the text, and what the query calls it.
        joined: the columns named that joins bring.
        which: asks for the ids of the trajectory and of the turn of each turn that the query is about, up to
            one more than `MOST_TURNS`; None where that would not be cheaper.
        in_place: puts the queries of what a query of ours reads in its place.
    """

    text: bytes
    places: Sequence[tuple[int, int, str]]
    joined: frozenset[str]
    which: str | None
    in_place: Callable[[str], str]

    def around(self) -> str:
        """Its text without the view."""
        return self._with("")

    def whole(self) -> str:
        """The query, with as much of the view as it names."""
        return self._with(turns_query(self.joined))

    def of(self, turns: Sequence[tuple[str, str]]) -> str:
        """The query, of these turns alone: of each the ids of the trajectory and of the turn."""
        if not turns:
            return self._with(turns_query(self.joined, "false", "false"))
        trajectories, ids = ({turn[i] for turn in turns} for i in (0, 1))
        bounds = f"trajectory_id BETWEEN {literal(min(trajectories))} AND {literal(max(trajectories))}"
        # The bounds say nothing new, but by them DuckDB passes over row groups.
        among = f"trajectory_id IN ({', '.join(map(literal, sorted(trajectories)))}) AND {bounds}"
        only = f"s.{bounds} AND s.turn_id IN ({', '.join(map(literal, sorted(ids)))})"
        return self._with(turns_query(self.joined, among, only))

    def _with(self, view: str) -> str:
        view, parts, end = self.in_place(view), list[bytes](), 0
        for begin, after, alias in self.places:
            name = alias.replace('"', '""')
            parts += [self.text[end:begin], f'({view}) AS "{name}"'.encode() if view else b" "]
            end = after
        return b"".join([*parts, self.text[end:]]).decode()


def narrowed(
    connection: duckdb.DuckDBPyConnection, query: str, in_place: Callable[[str], str]
) -> Narrowed | None:
    """The query with what it names of `turns`; None where it is no SELECT that names the view."""
    if not _NAMES.search(query):
        return None
    explains = _EXPLAIN.match(query)
    begin = len(explains[0].encode()) if explains else 0
    text = query.encode()
    [[told]] = connection.execute("SELECT json_serialize_sql($1)", [text[begin:].decode()]).fetchall()
    parsed = orjson.loads(told)
    if parsed["error"] or len(parsed["statements"]) != 1:
        return None
    [statement] = parsed["statements"]
    tables = [part for part in _parts(statement) if _is_view(part)]
    if not tables or _is_hidden(statement, tables):
        return None
    joined = _joined(statement, {table["alias"] or TURNS.name for table in tables})
    named = []
    for table in tables:
        at = begin + table["query_location"]
        named.append((at, at + table["query_location_length"], table["alias"] or TURNS.name))
    few = len(tables) == 1 and joined & DETAILED and not explains and not statement["named_param_map"]
    which = _which(connection, statement, tables[0]) if few else None
    return Narrowed(text, sorted(named), joined, which, in_place)


def _parts(value: Any) -> list[Parsed]:
    """All objects in what the parser made, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    parts = [part for each in inner for part in _parts(each)]
    return [value, *parts] if isinstance(value, dict) else parts


def _expressions(value: Any) -> list[Parsed]:
    return [part for part in _parts(value) if "class" in part]


def _is_view(part: Parsed) -> bool:
    named = part.get("type"), part.get("schema_name"), str(part.get("table_name")).lower()
    return named in [("BASE_TABLE", schema, TURNS.name) for schema in ("", "main")]


def _is_hidden(statement: Parsed, tables: Sequence[Parsed]) -> bool:
    """Whether the name may mean something else, or its columns have others' names."""
    ctes = [
        entry["key"].lower() for part in _parts(statement) for entry in part.get("cte_map", {}).get("map", ())
    ]
    odd = any(table["sample"] or table["column_name_alias"] or table["at_clause"] for table in tables)
    return odd or TURNS.name in ctes


def _joined(value: Any, aliases: set[str]) -> frozenset[str]:
    """The joined columns that are named in a part of a query, whatever they are columns of; all of them, if
    it may name any."""
    names, rows = set[str](), {(alias.lower(),) for alias in aliases}
    for part in _parts(value):
        kind = part.get("class")
        if kind in ("STAR", "POSITIONAL_REFERENCE") or part.get("ref_type") == "NATURAL":
            return _JOINED
        if kind == "COLUMN_REF":
            path = tuple(name.lower() for name in part["column_names"])
            if path in rows:
                return _JOINED
            names |= {*path}
        names |= {name.lower() for name in part.get("using_columns") or ()}
    return _JOINED & names


def _which(connection: duckdb.DuckDBPyConnection, statement: Parsed, table: Parsed) -> str | None:
    """The query for the ids of the turns that a query is about."""
    node = statement["node"]
    if node["type"] != "SELECT_NODE" or node["from_table"] is not table:
        return None
    alias, limits = {table["alias"] or TURNS.name}, {"limit": _number(MOST_TURNS + 1), "offset": None}
    every: Parsed = {"type": "LIMIT_MODIFIER", "limit_type": "ROW_COUNT", **limits}
    functions = _functions(connection, node)
    first = _is_limited(node) and _is_row_by_row(node, functions)
    decides = [node["where_clause"], node["modifiers"] if first else []]
    volatile = any(volatile for _, volatile in functions.values())
    if volatile or _joined(decides, alias) & DETAILED or not (first or node["where_clause"]):
        return None
    asked = node | _AFTER_ROWS | {"select_list": _IDS, "modifiers": node["modifiers"] if first else [every]}
    told = orjson.dumps({"error": False, "statements": [statement | {"node": asked}]}).decode()
    [[which]] = connection.execute("SELECT json_deserialize_sql($1)", [told]).fetchall()
    return str(which)


def _number(value: int) -> Parsed:
    literal = {"kind": "INTEGER", "text": str(value)}
    return {"class": "CONSTANT", "type": "VALUE_CONSTANT", "alias": "", "literal": literal}


def _is_limited(node: Parsed) -> bool:
    """Whether it ends in a small LIMIT, and its order is one of the view's rows, not of what is selected."""
    modifiers = node["modifiers"]
    kinds = [modifier["type"] for modifier in modifiers]
    if kinds not in (["LIMIT_MODIFIER"], ["ORDER_MODIFIER", "LIMIT_MODIFIER"]):
        return False
    limit = modifiers[-1]
    value = (limit["limit"] or {}).get("literal", {}).get("text", "")
    if limit["offset"] is not None or limit["limit_type"] != "ROW_COUNT" or not value.isdecimal():
        return False
    orders = modifiers[0].get("orders", ())
    renamed = any(item["alias"] for item in node["select_list"])
    places = any(order["expression"]["class"] in ("CONSTANT", "STAR") for order in orders)
    return int(value) <= MOST_TURNS and not (orders and (renamed or places))


def _functions(connection: duckdb.DuckDBPyConnection, node: Parsed) -> dict[str, tuple[bool, bool]]:
    """The functions that a query calls: whether each is a scalar one, and whether it may give another value
    when it is asked again."""
    called = {part["function_name"].lower() for part in _expressions(node) if part["class"] == "FUNCTION"}
    if not called:
        return {}
    rows = connection.execute(
        "SELECT function_name, bool_and(function_type = 'scalar'), "
        "coalesce(bool_or(stability = 'VOLATILE'), false) "
        "FROM duckdb_functions() WHERE function_name IN (SELECT unnest($1)) GROUP BY ALL",
        [sorted(called)],
    ).fetchall()
    return dict.fromkeys(called, (False, True)) | {
        name: (scalar, volatile) for name, scalar, volatile in rows
    }


def _is_row_by_row(node: Parsed, functions: Mapping[str, tuple[bool, bool]]) -> bool:
    """Whether what is selected is one value of each row: no aggregate, window, subquery, or list that is
    unrolled."""
    if any(node[name] != nothing for name, nothing in _AFTER_ROWS.items()):
        return False
    selected = _expressions(node["select_list"])
    called = {part["function_name"].lower() for part in selected if part["class"] == "FUNCTION"}
    scalar = all(functions[name][0] for name in called)
    return scalar and {part["class"] for part in selected} <= _ROW_BY_ROW
