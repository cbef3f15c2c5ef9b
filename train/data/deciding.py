"""What decides on samples that are known by the columns of their turns: which policies and versions sampled
them, the version by which one becomes too old, and a reward that is no number."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.sql.sandbox import Connection
from rollbook.train.data.path_columns import Ints, PathColumns
from rollbook.train.data.samples import deciding_places

Span = tuple[str, int, int, int]
"""Policy, version, start and end of a part of what a turn sampled."""
Spans = Mapping[str, Sequence[Span]]
"""Turn -> its spans, of turns that are not whole of one version."""

_SPANS = """
    SELECT e.turn_id, list_transform(e.version_spans, lambda s: [s.policy]),
           list_transform(e.version_spans, lambda s: [s.version, s.start, s."end"])
    FROM internal.several_turns e JOIN (
        SELECT s.trajectory_id, s.turn_id FROM internal.turn_scalars s JOIN chosen USING (trajectory_id)
        WHERE NOT s.one_version) m USING (trajectory_id, turn_id)
    WHERE e.kind = 'turn.completed' AND len(e.version_spans) > 0"""


def spans_of_several(connection: Connection) -> Spans:
    """The spans of each turn of the relation `chosen`'s trajectories that is not whole of one version."""
    rows = connection.execute(_SPANS).fetchall()
    return {
        turn_id: [(*policy, *rest) for policy, rest in zip(policies, numbers, strict=True)]
        for turn_id, policies, numbers in rows
    }


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """Of R turns the versions of the policy in training that sampled them; arrays are [R].

    Attributes:
        policy: in training; None: versions of all policies count, as if they were one.
        tokens: of a known version of it; least, greatest: of these versions, -1 where there are no tokens.
        strangers: numbers of policies that the recipe does not name, 0 where none sampled any.
        names: of these policies, by number.
        others: turn -> where the tokens of other policies than that in training begin and end.
    """

    policy: str | None
    tokens: Ints
    least: Ints
    greatest: Ints
    strangers: Ints
    names: npt.NDArray[np.str_]
    others: Mapping[str, Sequence[tuple[int, int]]]


def versions_of(turns: pa.Table, policy: str | None, named: Collection[str], spans: Spans) -> Versions:
    """The versions of a policy that sampled turns.

    Args:
        policy: in training; None: versions of all policies count, as if they were one.
        named: other policies that the recipe names.
        spans: of turns that are not whole of one version.
    """
    known = turns["known_tokens"].fill_null(0).to_numpy().astype(np.int64)
    least, greatest = (
        np.where(known > 0, turns[name].fill_null(-1).to_numpy().astype(np.int64), -1)
        for name in ("min_version", "max_version")
    )
    nobody, none = np.zeros(len(known), np.int64), np.array([""], np.str_)
    if policy is None:
        return Versions(None, known, least, greatest, nobody, none, {})
    ids, of = turns["turn_id"], turns["policy"].fill_null(policy).combine_chunks()
    whole = turns["one_version"].fill_null(False).to_numpy()
    foreign = np.flatnonzero(whole & (known > 0) & pc.not_equal(of, policy).to_numpy(zero_copy_only=False))
    parts: dict[int, Sequence[Span]] = {}
    for row, length, name in zip(foreign.tolist(), known[foreign].tolist(), of.take(foreign), strict=True):
        parts[row] = [(name.as_py(), 0, 0, length)]
    mixed = np.flatnonzero(~whole & (known > 0))
    for row, turn_id in zip(mixed.tolist(), ids.take(pa.array(mixed)).to_pylist(), strict=True):
        if any(span[0] != policy for span in spans[turn_id]):
            parts[row] = spans[turn_id]
    unnamed = {span[0] for row in parts.values() for span in row} - {policy, *named}
    names = ["", *sorted(unnamed)]
    tokens, strangers, others = known.copy(), nobody, dict[str, list[tuple[int, int]]]()
    for row, turn_id in zip(parts, ids.take(pa.array(list(parts), pa.int64())).to_pylist(), strict=True):
        own = [span for span in parts[row] if span[0] == policy]
        tokens[row] = sum(end - start for _, _, start, end in own)
        least[row] = min((version for _, version, _, _ in own), default=-1)
        greatest[row] = max((version for _, version, _, _ in own), default=-1)
        strangers[row] = max((names.index(s[0]) for s in parts[row] if s[0] in unnamed), default=0)
        others[turn_id] = [(start, end) for of_policy, _, start, end in parts[row] if of_policy != policy]
    return Versions(policy, tokens, least, greatest, strangers, np.array(names, np.str_), others)


def deciding_versions(
    share: float,
    turns: pa.Table,
    paths: PathColumns,
    known: Ints,
    lowest: Ints,
    spans: Spans,
    policy: str | None,
) -> Ints:
    """The version of the token at `deciding_places` of each path, int64 [N]; -1 where no token has one.

    Args:
        turns: column `turn_id`.
        known: tokens with loss of a known version of the policy, of each turn on each path.
        lowest: the least of these versions, of each turn.
        spans: of turns that are not whole of one version.
        policy: in training; None: any counts.
    """
    count = len(paths.starts) - 1
    at = np.flatnonzero(known > 0)
    of_path = np.repeat(np.arange(count), np.diff(paths.starts))[at]
    names = turns["turn_id"].take(pa.array(paths.path[at])).to_pylist() if spans else [""] * len(at)
    several = np.array([name in spans for name in names], np.bool_)
    parts = [
        (path, version, end - start)
        for path, name in zip(of_path, names, strict=True)
        for of_policy, version, start, end in spans.get(name, ())
        if policy in (None, of_policy)
    ]
    apart = np.array(parts, np.int64).reshape(-1, 3)
    whole = at[~several]
    of = np.concatenate([of_path[~several], apart[:, 0]])
    versions = np.concatenate([lowest[paths.path[whole]], apart[:, 1]])
    tokens = np.concatenate([known[whole], apart[:, 2]])
    order = np.lexsort([versions, of])
    totals = np.bincount(of, tokens, count).astype(np.int64)
    some = totals > 0
    places = np.cumsum(totals) - totals + deciding_places(share, totals)
    found = np.full(count, -1, np.int64)
    found[some] = versions[order][np.searchsorted(np.cumsum(tokens[order]), places[some], side="right")]
    return found


def odd_rewards(
    rewards: Mapping[str, float], turns: pa.Table, paths: PathColumns, tokens: Ints
) -> npt.NDArray[np.float64]:
    """Of each path the first reward of a turn that is no number; 0 where it has none, float64 [N].

    Args:
        rewards: turn -> its reward.
        tokens: with loss, of each turn on each path: a turn without one has no reward there.
    """
    found = np.zeros(len(paths.starts) - 1)
    odd = {turn_id: reward for turn_id, reward in rewards.items() if not np.isfinite(reward)}
    if not odd:
        return found
    named = {row: odd[name] for row, name in enumerate(turns["turn_id"].to_pylist()) if name in odd}
    of_path = np.repeat(np.arange(len(found)), np.diff(paths.starts))
    for at in np.flatnonzero(np.isin(paths.path, list(named)) & (tokens > 0))[::-1]:
        found[of_path[at]] = named[int(paths.path[at])]
    return found
