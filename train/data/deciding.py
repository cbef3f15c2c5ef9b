"""What decides on samples that are known by the columns of their turns: the version by which one becomes too
old, and a reward that is no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store.sql.sandbox import Connection
from rollbook.train.data.path_columns import PathColumns
from rollbook.train.data.samples import deciding_places

Ints = npt.NDArray[np.int64]
Spans = Mapping[str, Sequence[tuple[int, int]]]
"""Turn -> (version, tokens), of turns that several versions sampled."""

_SPANS = """
    SELECT e.turn_id, list_transform(e.version_spans, lambda s: s.version),
           list_transform(e.version_spans, lambda s: s."end" - s.start)
    FROM internal.turn_events e JOIN (
        SELECT s.trajectory_id, s.turn_id FROM internal.turn_scalars s JOIN chosen USING (trajectory_id)
        WHERE s.min_version < s.max_version) m USING (trajectory_id, turn_id)
    WHERE e.kind = 'turn.completed'"""


def spans_of_several(connection: Connection) -> Spans:
    """The spans of each turn of the relation `chosen`'s trajectories that several versions sampled."""
    rows = connection.execute(_SPANS).fetchall()
    return {turn_id: list(zip(versions, counts, strict=True)) for turn_id, versions, counts in rows}


def deciding_versions(share: float, turns: pa.Table, paths: PathColumns, known: Ints, spans: Spans) -> Ints:
    """The version of the token at `deciding_places` of each path, int64 [N]; -1 where no token has one.

    Args:
        turns: columns `turn_id` and `min_version`.
        known: tokens with loss whose version is known, of each turn on each path.
        spans: of turns that several versions sampled.
    """
    count = len(paths.starts) - 1
    at = np.flatnonzero(known > 0)
    of_path = np.repeat(np.arange(count), np.diff(paths.starts))[at]
    names = turns["turn_id"].take(pa.array(paths.path[at])).to_pylist() if spans else [""] * len(at)
    several = np.array([name in spans for name in names], np.bool_)
    parts = [(path, *part) for path, name in zip(of_path, names, strict=True) for part in spans.get(name, ())]
    apart = np.array(parts, np.int64).reshape(-1, 3)
    whole = at[~several]
    lowest = turns["min_version"].fill_null(-1).to_numpy()[paths.path[whole]]
    of = np.concatenate([of_path[~several], apart[:, 0]])
    versions = np.concatenate([lowest.astype(np.int64), apart[:, 1]])
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
