"""Full text over messages and replies, and tables of trajectories by what they are.

Text is looked for in the log's own JSON, by a scan that DuckDB does at some gigabytes a second: a million
turns need no index. What is found is read again as messages, so that a hit is one in a text.
"""

from __future__ import annotations

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
ORDERS: Mapping[str, str] = {
    "newest": "trajectory_id DESC",
    "best": "reward DESC NULLS LAST, trajectory_id DESC",
    "worst": "reward ASC NULLS LAST, trajectory_id DESC",
    "longest": "turns DESC, trajectory_id DESC",
    "slowest": "finished - opened DESC NULLS LAST, trajectory_id DESC",
}
FILTERS = ("run", "split", "status", "task", "group")
"""Columns that are to be equal to what an address says."""
BOUNDS = ("label", "version", "least", "most_reward", "before")


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
    """

    words: str
    filters: Mapping[str, str]
    order: str
    orders: Sequence[str]
    hits: Sequence[Hit]
    trajectories: Sequence[TrajectoryLine]
    more: bool
    runs: Sequence[str]


_RUNS = "SELECT DISTINCT run FROM internal.trajectory_scalars ORDER BY run"
_TRAJECTORIES = """
    SELECT trajectory_id, trajectory, run, "group", task, split, status, reward, turns, min_version,
           max_version, opened, epoch(finished - opened) AS seconds
    FROM trajectories WHERE {where} ORDER BY {order} LIMIT $most"""
_WORDS = """
    SELECT trajectory_id, turn_id, run, kind, extra FROM internal.turn_events
    WHERE {text} AND {where} LIMIT $most"""
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
    hits: Sequence[Hit] = ()
    lines: Sequence[TrajectoryLine] = ()
    if words:
        hits, more = _hits(snapshot, words, where, parameters)
    else:
        rows = snapshot.rows(
            _TRAJECTORIES.format(where=where, order=ORDERS[order]), **parameters, most=LISTED + 1
        )
        lines, more = [TrajectoryLine(**row) for row in rows[:LISTED]], len(rows) > LISTED
    return Search(words, filters, order, list(ORDERS), hits, lines, more, runs)


def _conditions(filters: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """SQL over the columns of `trajectories`, and its parameters."""
    conditions, parameters = [], dict[str, Any]()
    for name in FILTERS:
        if filters[name]:
            conditions.append(f'"{name}" = ${name}')
            parameters[name] = filters[name]
    if label := filters["label"]:
        key, _, value = label.partition("=")
        conditions.append(
            "labels->>$label_key = $label_value" if value else "labels->>$label_key IS NOT NULL"
        )
        parameters |= {"label_key": key} | ({"label_value": value} if value else {})
    if (version := whole_number(filters, "version")) is not None:
        conditions.append("$version BETWEEN min_version AND max_version")
        parameters["version"] = version
    if before := filters["before"]:
        conditions.append("trajectory_id < $before")
        parameters["before"] = before
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
    text = "contains(lower(extra), $words)" if folded else "contains(extra, $words)"
    selected = "true"
    if parameters:
        selected = f"trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE {where})"
    rows = snapshot.rows(_WORDS.format(text=text, where=selected), **parameters, words=spelled, most=READ)
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
