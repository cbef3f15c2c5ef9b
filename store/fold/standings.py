"""How far the trajectories of a run have come, put together of what units and the live tail say. Pure.

Only what decides whether a trajectory can still be trained: `sealed.projections.standings` has the columns.
Most trajectories are whole in one unit, and none of these is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.events import VOID


@dataclass(frozen=True, slots=True)
class Plan:
    """What a planned step named, without the rest of its manifest.

    Attributes:
        seq, event_id: of its event.
        trajectories: of them those that somebody asked about.
    """

    seq: int
    event_id: str
    policy: str
    policy_version: int
    step: int
    attempt: int
    trajectories: Sequence[str]


@dataclass(frozen=True, slots=True)
class Drop:
    """A sample that was dropped, without the reason."""

    seq: int
    event_id: str
    trajectory_id: str


def plans_of(table: pa.Table, among: pa.ChunkedArray) -> list[Plan]:
    """The rows of `sealed.projections.plans` with these trajectories alone.

    Args:
        table: no more than the columns of `Plan`, and `samples`.
    """
    samples = table["samples"].combine_chunks()
    named = pc.struct_field(samples.flatten(), "trajectory_id")
    asked = pc.is_in(named, among)
    counts = np.bincount(pc.list_parent_indices(samples).filter(asked), minlength=len(samples))
    ids, ends = named.filter(asked).to_pylist(), np.cumsum(counts).tolist()
    rows = table.drop_columns("samples").to_pylist()
    return [
        Plan(**row, trajectories=ids[end - count : end])
        for row, count, end in zip(rows, counts.tolist(), ends, strict=True)
    ]


def standings(tables: Iterable[pa.Table], run: str) -> pa.Table:
    """One row per trajectory of the run that was opened, of tables that may hold one several times."""
    rows = pa.concat_tables(tables)
    mine = pc.equal(rows["run"], run)
    merged = _merged(rows.filter(pc.and_not(mine, rows["whole"])).to_pylist())
    whole = rows.filter(pc.and_(mine, rows["whole"]))
    return pa.concat_tables([whole, pa.Table.from_pylist(merged, rows.schema)])


def _merged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories of these rows, each once; those that were opened elsewhere are whole there."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = merged.setdefault(row["trajectory_id"], row)
        if known is not row:
            known |= {name: value for name, value in row.items() if value is not None} | _both(known, row)
    for known in merged.values():
        delivered = set(known["delivered"])
        known["productive"] |= not delivered.isdisjoint(known["sampled"])
        known["sampled"] = [turn for turn in known["sampled"] if turn not in delivered]
    return [known for known in merged.values() if known["opened"] is not None]


def _both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What two rows of a trajectory say together."""
    oldest: dict[str, int] = {}
    for row in (a, b):
        for policy, version in zip(row["policies"], row["oldest"], strict=True):
            oldest[policy] = min(version, oldest.get(policy, version))
    return {
        "productive": a["productive"] or b["productive"],
        "policies": list(oldest),
        "oldest": list(oldest.values()),
        **{name: a[name] + b[name] for name in ("sampled", "delivered")},
    }


def running(known: pa.Table) -> list[str]:
    """The trajectories of `standings` that have not ended, in the order in which they were opened."""
    ids: list[str] = _in_order(known.filter(pc.is_null(known["finished"])))["trajectory_id"].to_pylist()
    return ids


def latest(known: pa.Table, splits: Collection[str], most: int) -> pa.Table:
    """Rows of `standings` of these splits: all that run, and so many of those that ended, the latest."""
    wanted = pc.is_in(known["split"], pa.array(sorted(splits), pa.string()))
    void = pc.fill_null(pc.equal(known["status"], VOID), False)
    wanted, over = pc.and_not(wanted, void), pc.is_valid(known["finished"])
    ended = known.filter(pc.and_(wanted, over))
    if ended.num_rows > most:
        order = [("finished", "descending"), ("trajectory_id", "descending")]
        keys = ended.select([name for name, _ in order])
        ended = ended.take(pc.select_k_unstable(keys, most, sort_keys=order))
    return pa.concat_tables([known.filter(pc.and_not(wanted, over)), ended])


def unused(known: pa.Table, used: Collection[str]) -> pa.Table:
    """Rows of `standings` in the order of opening, without those that were used together with all
    of their group: to take and to remove them would change nothing."""
    free = pc.invert(pc.is_in(known["trajectory_id"], pa.array(list(used), pa.string())))
    groups = known["group"].filter(free).unique()
    mixed = pc.and_(pc.is_valid(known["group"]), pc.is_in(known["group"], groups))
    return _in_order(known.filter(pc.or_(free, mixed)))


def _in_order(known: pa.Table) -> pa.Table:
    return known.sort_by([("opened", "ascending"), ("trajectory_id", "ascending")])
