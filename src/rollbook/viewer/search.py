"""Full text over messages and replies, and tables of trajectories by what they are.

Text is looked for in the log's own JSON, by a scan that DuckDB does at some gigabytes a second: a million
turns need no index. What is found is read again as messages, so that a hit is one in a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson

from rollbook.store.errors import RequestError
from rollbook.store.sql.relations import AMONG, among
from rollbook.transcript.messages import read_message
from rollbook.viewer.pages import Page, Query, whole_number
from rollbook.viewer.snapshots import Snapshot

LISTED = 50
"""Rows of a page."""
READ = 400
"""Turns that are read again as messages, of those that hold the words somewhere."""
AROUND = 90
"""Characters on either side of a hit."""
ORDERS: Mapping[str, tuple[str, bool]] = {
    "newest": ("trajectory_id", True),
    "best": ("reward", True),
    "worst": ("reward", False),
    "longest": ("turns", True),
    "slowest": ("epoch(finished - opened)", True),
}
"""Of a table: SQL of what its rows are ordered by, and whether the greatest comes first. Those without it
come last, and of equals the newest first."""
FILTERS = ("run", "split", "status", "task", "group")
"""Columns that are to be equal to what an address says."""
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""What RE2 takes for more than itself."""
BOUNDS = ("label", "tool", "version", "least", "most_reward", "before", "beyond")


@dataclass(frozen=True, slots=True)
class Hit:
    """Words in a turn: the text before, the words as they stand there, the text behind."""

    trajectory_id: str
    trajectory: str | None
    run: str
    turn_id: str
    role: str
    before: str
    words: str
    behind: str


@dataclass(frozen=True, slots=True)
class TrajectoryLine:
    """A trajectory in a table."""

    trajectory_id: str
    trajectory: str
    run: str
    group: str | None
    task: str | None
    split: str
    status: str
    reward: float | None
    turns: int
    min_version: int | None
    max_version: int | None
    opened: datetime
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Search:
    """What an address looks for: trajectories by what they are, or words in their messages.

    Attributes:
        filters: by which trajectories are selected; empty where by none.
        hits: where words are looked for; more: there are others.
        next: of a table with others, what of the last row its next page begins behind: `before` and `beyond`.
    """

    words: str
    filters: Mapping[str, str]
    order: str
    orders: Sequence[str]
    hits: Sequence[Hit]
    trajectories: Sequence[TrajectoryLine]
    more: bool
    next: Mapping[str, Any]
    runs: Sequence[str]


_RUNS = "SELECT DISTINCT run FROM internal.trajectory_scalars ORDER BY run"
_TRAJECTORIES = """
    SELECT trajectory_id, trajectory, run, "group", task, split, status, reward, turns, min_version,
           max_version, opened, epoch(finished - opened) AS seconds, {value} AS ordered_by
    FROM trajectories WHERE {where} ORDER BY ordered_by {order} NULLS LAST, trajectory_id DESC LIMIT $most"""
_WORDS = """
    SELECT trajectory_id, turn_id, run, kind, extra FROM internal.turn_events
    WHERE {text} AND {where} LIMIT $most"""
_LABELLED = """(labels->>$label_key {compared} OR trajectory_id IN (
      SELECT trajectory_id FROM internal.mark_events
      WHERE kind = 'label.added' AND extra->>'$.name' = $label_key AND extra->>'$.value' {compared}))"""
"""With a label that it was opened with, or that was added later."""
_CALLED = """trajectory_id IN (
      SELECT trajectory_id FROM internal.turn_events
      WHERE kind = 'turn.completed' AND contains(extra, '"tool_calls":[') AND contains(extra, $tool))"""
"""With a reply that calls a tool. Extras are JSON without spaces."""
_NAMES = f"""
    SELECT trajectory_id, any_value(trajectory) AS trajectory FROM internal.trajectory_parts
    WHERE {AMONG} GROUP BY trajectory_id"""


def read_search(snapshot: Snapshot, query: Query) -> Search:
    """What an address looks for.

    Raises:
        RequestError: 400, the order or a number is none.
    """
    filters = {name: query.get(name, "") for name in (*FILTERS, *BOUNDS)}
    order = query.get("by") or next(iter(ORDERS))
    if order not in ORDERS:
        raise RequestError(400, "bad_query", f"by={order[:40]!r}: use {', '.join(ORDERS)}")
    words = query.get("q", "").strip()
    where, parameters = _conditions(filters)
    runs = [row["run"] for row in snapshot.once(("runs of trajectories",), lambda: snapshot.rows(_RUNS))]
    if words:
        hits, more = _hits(snapshot, words, where, parameters)
        return Search(words, filters, order, list(ORDERS), hits, (), more, {}, runs)
    value, falling = ORDERS[order]
    behind, last = _behind(filters, value, falling)
    table = _TRAJECTORIES.format(
        where=f"{where} AND {behind}", value=value, order="DESC" if falling else "ASC"
    )
    rows = snapshot.rows(table, **parameters, **last, most=LISTED + 1)
    ends = [(row["trajectory_id"], row.pop("ordered_by")) for row in rows[:LISTED]]
    lines, more = [TrajectoryLine(**row) for row in rows[:LISTED]], len(rows) > LISTED
    after = dict(zip(("before", "beyond"), ends[-1], strict=True)) if more else {}
    after |= {"beyond": None} if order == "newest" else {}
    return Search(words, filters, order, list(ORDERS), (), lines, more, after, runs)


def _behind(filters: Mapping[str, str], value: str, falling: bool) -> tuple[str, dict[str, Any]]:
    """A condition for the rows behind one, of which an address says the id and what it is ordered by; and its
    parameters."""
    if not (before := filters["before"]):
        return "true", {}
    if value == "trajectory_id":
        return "trajectory_id < $before", {"before": before}
    if not filters["beyond"]:  # it is ordered by nothing
        return f"({value} IS NULL AND trajectory_id < $before)", {"before": before}
    further = f"{value} {'<' if falling else '>'} $beyond"
    condition = f"({further} OR {value} IS NULL OR ({value} = $beyond AND trajectory_id < $before))"
    return condition, {"before": before, "beyond": _number(filters, "beyond")}


def _conditions(filters: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """SQL over the columns of `trajectories`, and its parameters."""
    conditions, parameters = [], dict[str, Any]()
    for name in FILTERS:
        if filters[name]:
            conditions.append(f'"{name}" = ${name}')
            parameters[name] = filters[name]
    if label := filters["label"]:
        key, _, value = label.partition("=")
        compared = "= $label_value" if value else "IS NOT NULL"
        conditions.append(_LABELLED.format(compared=compared))
        parameters |= {"label_key": key} | ({"label_value": value} if value else {})
    if tool := filters["tool"]:
        conditions.append(_CALLED)
        parameters["tool"] = '"name":' + orjson.dumps(tool).decode()
    if (version := whole_number(filters, "version")) is not None:
        conditions.append("$version BETWEEN min_version AND max_version")
        parameters["version"] = version
    for name, compare in (("least", ">="), ("most_reward", "<=")):
        if filters[name]:
            conditions.append(f"reward {compare} ${name}")
            parameters[name] = _number(filters, name)
    return " AND ".join(conditions) or "true", parameters


def _number(filters: Mapping[str, str], name: str) -> float:
    try:
        return float(filters[name])
    except ValueError:
        raise RequestError(400, "bad_query", f"{name}={filters[name][:40]!r}: give a number") from None


def _hits(
    snapshot: Snapshot, words: str, where: str, parameters: Mapping[str, Any]
) -> tuple[list[Hit], bool]:
    """Turns of selected trajectories that hold words, and whether there are more."""
    # In the log the words stand as JSON spells them.
    spelled = orjson.dumps(words).decode()[1:-1]
    folded = words == words.lower()
    # A pattern in any case costs a quarter more than to look for the words as they are; lower() doubles it.
    text = "regexp_matches(extra, $words)" if folded else "contains(extra, $words)"
    wanted = "(?i)" + _SPECIAL.sub(r"\\\g<0>", spelled) if folded else spelled
    selected = "true"
    if parameters:
        selected = f"trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE {where})"
    rows = snapshot.rows(_WORDS.format(text=text, where=selected), **parameters, words=wanted, most=READ)
    hits: list[Hit] = []
    for row in rows:
        for role, found in _texts(row["kind"], orjson.loads(row["extra"])):
            at = (found.lower() if folded else found).find(words)
            if at >= 0:
                end = at + len(words)
                hits.append(
                    Hit(
                        *(row["trajectory_id"], None, row["run"], row["turn_id"], role),
                        found[max(at - AROUND, 0) : at],
                        found[at:end],
                        found[end : end + AROUND],
                    )
                )
                break
        if len(hits) > LISTED:
            break
    names = _names(snapshot, hits)
    return [_named(hit, names) for hit in hits[:LISTED]], len(hits) > LISTED or len(rows) == READ


def _texts(kind: str, extra: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, text) of the messages of a request, or of a reply."""
    messages = [extra.get("reply")] if kind == "turn.completed" else extra.get("messages") or ()
    for value in messages:
        message = read_message(value, {})
        for part in message.parts:
            yield message.role, f"{part.name}({part.text})" if part.kind == "call" else part.text


def _names(snapshot: Snapshot, hits: Sequence[Hit]) -> dict[str, str]:
    ids = among(hit.trajectory_id for hit in hits)
    return {row["trajectory_id"]: row["trajectory"] for row in snapshot.rows(_NAMES, **ids)}


def _named(hit: Hit, names: Mapping[str, str]) -> Hit:
    return replace(hit, trajectory=names.get(hit.trajectory_id))


PAGES = (Page("/trajectories", "search.html", read_search),)
