"""Which samples a log holds at a cut, as columns: what each is made of, and what decides whether it
is used.

No event is decoded for this: it comes from the scalars of turns (`store.sql`), which sealed
units keep ready. Tokens are read when a sample is used: `train.batches.materialize`. Columns
hold the policies and versions that sampled a sample, the version by which it becomes too old,
whether a reward is not a number, the order of a trajectory's turns over several lanes, and
whether a turn records the experts of its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.train.config.recipe import STATUSES, RecipeConfig
from rollbook.train.select.conditions import conditions_of
from rollbook.train.select.recipe import NO_STATUS, NOWHERE, Candidates
from rollbook.train.select.routing import FitCheck, Mixture
from rollbook.train.select.sample_ref import SampleRef, numbered
from rollbook.train.select.samples import (
    CUT_OFF,
    TRUNCATED,
    Bools,
    Ints,
    PathColumns,
    Sums,
    deciding_places,
    path_columns,
)

_TRAJECTORIES = """
    SELECT o.trajectory_id, o.run, o.trajectory AS name, o."group",
           CASE WHEN o.run = $own THEN o."group" ELSE o.run || '/' || o."group" END AS group_key, o.split,
           o.status, o.success,
           o.lane AS opened_lane, o.opened, f.lane AS finished_lane, f.seq AS finished_seq, r.reward,
           {chosen} AS chosen
    FROM internal.trajectory_scalars o
    ANTI JOIN left_out USING (trajectory_id)
    JOIN (SELECT trajectory_id, max(lane) AS lane, max(seq) AS seq FROM internal.mark_events
          WHERE kind = 'trajectory.finished' GROUP BY trajectory_id) f USING (trajectory_id)
    LEFT JOIN (SELECT trajectory_id, arg_max(reward, (lane, seq)) AS reward FROM rewards
               WHERE turn_id IS NULL AND NOT superseded AND source = $source
               GROUP BY trajectory_id) r USING (trajectory_id)
    WHERE list_contains($runs, o.run) AND list_contains($splits, o.split)
    ORDER BY name, o.run"""

_TURN_REWARDS = """
    SELECT turn_id, arg_max(reward, (lane, seq)) AS reward FROM rewards
    WHERE list_contains($runs, run) AND turn_id IS NOT NULL AND NOT superseded AND source = $source GROUP BY
    turn_id"""

_TURNS = """
    SELECT t.place, s.turn_id, s.parent_turn_id, s.lane, s.completed_lane, s.completed_seq,
           s.prompt_length, s.delta_length, s.completion_length, s.known_tokens, s.min_version, s.max_version,
           s.policy, s.one_version,
           s.finish_reason,
           s.delivered IS NOT NULL AS delivered, s.altered, s.erased, s.exact_logprobs, s.temperature,
           s.lowest_token, s.highest_token, s.prompt_sha256, s.sum_logprob
    FROM internal.turn_scalars s JOIN chosen t USING (trajectory_id)
    WHERE s.completed IS NOT NULL ORDER BY t.place, s.seq"""


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The samples of the finished trajectories of a run, trajectories by name, leaves in turn order.

    Attributes:
        trajectories: a row each: `run`, `trajectory_id`, `group_key` (the group, and of another run that
            too), `name`, `group`, `split`, `status`, `reward`, and where it begins and ends.
        turns: a row for each completed turn of theirs, in turn order; `place` is its trajectory's row.
        trajectory, leaf: of each sample the trajectory's row, and the leaf's among the turns.
        starts: where each sample's path begins in the next three; one more, for the end.
        path: rows of turns, from the root to the leaf.
        sampled, trained: whether the path owns the turn and the client had it; whether it has loss.
        length, trained_tokens, learnable, unknown: in tokens.
        oldest, newest, deciding: versions (`NOWHERE`: none), see `SampleRef`; lowest, highest: tokens.
        truncated: see `Sample`.
        exact, erased: see `SampleRef`; preferred, infinite, turn_reward, misrouted, stranger: see `Sample`.
        others: turn -> where tokens begin and end that other policies sampled than the one in training.
        turn_rewards: turn -> its reward, of the turns that have one.
    """

    trajectories: pa.Table
    turns: pa.Table
    trajectory: Ints
    leaf: Ints
    starts: Ints
    path: Ints
    sampled: Bools
    trained: Bools
    length: Ints
    trained_tokens: Ints
    unknown: Ints
    learnable: Ints
    oldest: Ints
    newest: Ints
    deciding: Ints
    truncated: Bools
    lowest: Ints
    highest: Ints
    exact: Bools
    erased: Bools
    preferred: Bools
    infinite: Bools
    turn_reward: npt.NDArray[np.float64]
    misrouted: Texts
    stranger: Texts
    turn_rewards: Mapping[str, float]
    others: Mapping[str, Sequence[tuple[int, int]]]

    def __len__(self) -> int:
        return len(self.leaf)

    def without_paths_of(self, trajectories: Collection[str]) -> References:
        """The same references, with no path of these trajectories preferred."""
        ids = self.trajectories["trajectory_id"]
        these = pc.is_in(ids, pa.array(sorted(trajectories), pa.string())).to_numpy(zero_copy_only=False)
        return replace(self, preferred=self.preferred & ~these[self.trajectory])

    def candidates(self) -> tuple[Ints, Candidates]:
        """The numbers of the samples that are candidates of a recipe, and the values that it
        decides by."""
        at = np.flatnonzero((self.trained_tokens > 0) | self.erased)
        rewards = self.trajectories["reward"].cast(pa.float64()).to_numpy()
        groups = numbered(self.trajectories["group_key"].combine_chunks())
        success = self.trajectories["success"]
        return at, Candidates(
            groups=groups[self.trajectory[at]],
            trajectories=self.trajectory[at],
            succeeded=success.fill_null(False).to_numpy()[self.trajectory[at]],
            failed=pc.invert(success.fill_null(True)).to_numpy()[self.trajectory[at]],
            status=_codes(self.trajectories["status"])[self.trajectory[at]],
            chosen=self.trajectories["chosen"].to_numpy()[self.trajectory[at]],
            rewards=np.asarray(rewards, np.float64)[self.trajectory[at]],
            rewarded=self.trajectories["reward"].is_valid().to_numpy()[self.trajectory[at]],
            unknown=self.unknown[at],
            strangers=self.stranger[at],
            oldest=self.oldest[at],
            newest=self.newest[at],
            deciding=self.deciding[at],
            exact=self.exact[at],
            erased=self.erased[at],
            preferred=self.preferred[at],
            infinite=self.infinite[at],
            turn_rewards=self.turn_reward[at],
            learnable=self.learnable[at],
            lengths=self.length[at],
            lowest=self.lowest[at],
            highest=self.highest[at],
            misrouted=self.misrouted[at],
        )

    def refs(self, samples: Sequence[int] | Ints) -> list[SampleRef]:
        """References to samples, by number."""
        at = np.asarray(samples, np.int64)
        named = self.trajectories.select(_NAMED).take(pa.array(self.trajectory[at]))
        columns = {name: named[name].to_pylist() for name in _NAMED}
        columns["leaf_turn_id"] = self.turns["turn_id"].take(pa.array(self.leaf[at])).to_pylist()
        columns |= {name: getattr(self, column)[at].tolist() for name, column in _DECIDING.items()}
        for name in _OF_VERSIONS:
            columns[name] = [None if version == NOWHERE else version for version in columns[name]]
        return [SampleRef(*row) for row in zip(*(columns[name] for name in SampleRef.__slots__), strict=True)]

    def ref(self, sample: int) -> SampleRef:
        """A reference to one sample."""
        return self.refs([sample])[0]


_NAMED = ["run", "trajectory_id", "name", "group", "split", "reward", "success", "status", "chosen"]
_OF_VERSIONS = ("oldest_version", "newest_version", "deciding")
_DECIDING = {
    **dict(zip(_OF_VERSIONS, ("oldest", "newest", "deciding"), strict=True)),
    **{"trained": "trained_tokens", "lowest_token": "lowest", "highest_token": "highest"},
    **{name: name for name in ("unknown", "exact", "truncated", "erased", "preferred", "infinite")},
    **{name: name for name in ("turn_reward", "length", "learnable", "misrouted", "stranger")},
}
"""Fields of a `SampleRef`: columns of trajectories, versions, and what the others are in references."""


def find_references(
    log: Store,
    cut: Cut,
    run: str,
    recipe: RecipeConfig,
    mixture: Mixture | None = None,
    policy: str | None = None,
) -> References:
    """The samples that a recipe may choose from at a cut: of finished trajectories of its runs and
    splits.

    Args:
        run: that is trained; tokens of others have no version of its own.
        without: trajectories that are left out.
        mixture: of a model that is to replay the routing that turns record; None: routing is not
            checked.
        policy: in training; None: versions of all policies count, as if they were one.

    Raises:
        CorruptionError: a file is damaged.
        ConfigError: a condition is not SQL, or is no condition on the view `trajectories`.
    """
    with connect_at(log, format_cut(cut)) as connection:
        return references_over(connection, log, cut, run, recipe, (), mixture, policy)


def references_over(
    connection: Connection,
    log: Store,
    cut: Cut,
    run: str,
    recipe: RecipeConfig,
    without: Collection[str] = (),
    mixture: Mixture | None = None,
    policy: str | None = None,
) -> References:
    """`find_references` over an open connection to the log at the cut, for callers that have other
    queries, too.

    Raises:
        CorruptionError, ConfigError: as `find_references`.
    """
    conditions = conditions_of(recipe)
    holds = "true" if conditions is None else f"o.trajectory_id IN ({conditions.sql})"
    ids = pa.array(sorted(without), pa.string())
    connection.register("left_out", pa.table({"trajectory_id": ids}))
    params = {"runs": list(recipe.runs(run)), "source": recipe.reward_source}
    chosen = params | {"own": run, "splits": sorted(recipe.splits)}
    chosen |= {} if conditions is None else conditions.parameters
    try:
        rows = connection.relation(_TRAJECTORIES, chosen, chosen=holds)
        trajectories = rows.to_arrow_table().combine_chunks()
    except duckdb.Error as error:
        if conditions is None:
            raise
        raise ConfigError(f"recipe.where {conditions.condition!r}: {error}") from error
    places = pa.array(np.arange(trajectories.num_rows, dtype=np.int64))
    connection.register("chosen", trajectories.select(["trajectory_id"]).append_column("place", places))
    turns = connection.relation(_TURNS).to_arrow_table().combine_chunks()
    rewards = dict(connection.read(_TURN_REWARDS, params).fetchall())
    own = recipe.own(policy)
    # The oldest and the newest token are known of each turn, but not of which policies they are.
    several = 0 < recipe.deciding_share < 1 or own is not None
    some = several and not pc.all(turns["one_version"], min_count=0).as_py()
    spans = spans_of_several(connection) if some else {}
    turns = in_turn_order(log, cut, trajectories, turns)
    paths = path_columns(turns, recipe.paths)
    wrong = misrouted_paths(log, cut, trajectories, turns, paths, mixture)
    versions = versions_of(turns, own, recipe.other_policies or (), spans)
    share = recipe.deciding_share
    return _references(run, trajectories, turns, paths, rewards, share, versions, spans, wrong)


def _references(
    run: str,
    trajectories: pa.Table,
    turns: pa.Table,
    paths: PathColumns,
    rewards: Mapping[str, float],
    share: float,
    versions: Versions,
    spans: Spans,
    misrouted: Texts,
) -> References:
    starts, path, of_sample = paths.starts, paths.path, Sums(paths.starts)
    sampled, trained, spoiled = _with_loss(turns, paths)
    tokens = np.where(trained, _numbers(turns, "completion_length")[path], 0)
    known = np.where(trained, _numbers(turns, "known_tokens")[path], 0)
    leaf, root = path[starts[1:] - 1], starts[:-1]
    # The first token is predicted from nothing.
    first = ((_numbers(turns, "prompt_length")[path[root]] == 0) & (tokens[root] > 0)).astype(np.int64)
    oldest, newest, deciding = _versions(turns, paths, versions, trained, share, spans)
    strangers = of_sample.greatest(np.where(tokens > 0, versions.strangers[path], 0))
    own = pc.equal(trajectories["run"], run).to_numpy()[turns["place"].to_numpy()[leaf]]
    return References(
        trajectories=trajectories,
        turns=turns,
        trajectory=turns["place"].to_numpy()[leaf],
        leaf=leaf,
        starts=starts,
        path=path,
        sampled=sampled,
        trained=trained,
        length=_numbers(turns, "prompt_length")[leaf] + _numbers(turns, "completion_length")[leaf],
        trained_tokens=of_sample.sum(tokens),
        unknown=of_sample.sum(tokens - known),
        oldest=np.where(own, oldest, NOWHERE),
        newest=np.where(own, newest, NOWHERE),
        deciding=np.where(own, deciding, NOWHERE),
        truncated=_truncated(trajectories, turns, leaf),
        learnable=of_sample.sum(tokens) - first,
        lowest=of_sample.least(_numbers(turns, "lowest_token")[path]),
        highest=of_sample.greatest(_numbers(turns, "highest_token")[path]),
        exact=of_sample.sum((tokens > 0) & ~_flags(turns, "exact_logprobs")[path]) == 0,
        erased=spoiled,
        preferred=paths.preferred,
        infinite=of_sample.sum((tokens > 0) & ~_finite(turns["sum_logprob"])[path]) > 0,
        turn_reward=odd_rewards(rewards, turns, paths, tokens),
        misrouted=misrouted,
        stranger=versions.names[np.where(own, strangers, 0)],
        turn_rewards=rewards,
        others=versions.others,
    )


def _with_loss(turns: pa.Table, paths: PathColumns) -> tuple[Bools, Bools, Bools]:
    """For each turn on each path whether the client had it, and whether it has loss; for each path
    whether its loss was erased."""
    of_sample, path = Sums(paths.starts), paths.path
    sampled = paths.owned & _flags(turns, "delivered")[path]
    trained = sampled & ~_flags(turns, "altered")[path]
    lost = np.where(trained, _numbers(turns, "completion_length")[path], 0)
    spoiled = (of_sample.sum(_flags(turns, "erased")[path]) > 0) & (of_sample.sum(lost) > 0)
    return sampled, trained & ~np.repeat(spoiled, np.diff(paths.starts)), spoiled


def _truncated(trajectories: pa.Table, turns: pa.Table, leaf: Ints) -> Bools:
    """For each leaf whether it, or its trajectory, was cut off at its greatest length."""
    cut_off = np.asarray(pc.equal(turns["finish_reason"], CUT_OFF).fill_null(False).to_numpy(), np.bool_)
    ended = np.asarray(pc.equal(trajectories["status"], TRUNCATED).fill_null(False).to_numpy(), np.bool_)
    return cut_off[leaf] | ended[turns["place"].to_numpy()[leaf]]


def _versions(
    turns: pa.Table, paths: PathColumns, versions: Versions, trained: Bools, share: float, spans: Spans
) -> tuple[Ints, Ints, Ints]:
    """For each path the versions of its oldest and its newest token, and the one that decides on
    staleness."""
    of_path, none = Sums(paths.starts), np.iinfo(np.int64).max
    known = np.where(trained, versions.tokens[paths.path], 0)
    least = of_path.least(np.where(known > 0, versions.least[paths.path], none))
    oldest = np.where(least == none, NOWHERE, least)
    newest = of_path.greatest(np.where(known > 0, versions.greatest[paths.path], NOWHERE))
    if 0 < share < 1:
        of_which = (versions.least, spans, versions.policy)
        return oldest, newest, deciding_versions(share, turns, paths, known, *of_which)
    return oldest, newest, oldest if share == 0 else newest


def _codes(status: pa.ChunkedArray) -> Ints:
    """The index of each status in `STATUSES`; `NO_STATUS` for any other."""
    places = pc.index_in(status, value_set=pa.array(STATUSES))
    return np.asarray(places.fill_null(NO_STATUS).to_numpy(), np.int64)


def _flags(table: pa.Table, name: str) -> Bools:
    return np.asarray(table[name].fill_null(False).to_numpy(), np.bool_)


def _finite(sums: pa.ChunkedArray) -> Bools:
    return np.asarray(pc.is_finite(sums.cast(pa.float64())).fill_null(True).to_numpy(), np.bool_)


def _numbers(table: pa.Table, name: str) -> Ints:
    return np.asarray(table[name].fill_null(0).to_numpy(), np.int64)


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
    """The spans of each turn that is not wholly of one version, in the trajectories of the relation
    `chosen`."""
    rows = connection.read(_SPANS).fetchall()
    return {
        turn_id: [(*policy, *rest) for policy, rest in zip(policies, numbers, strict=True)]
        for turn_id, policies, numbers in rows
    }


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """For R turns, the versions of the policy in training that sampled them; arrays are [R].

    Attributes:
        policy: in training; None: versions of all policies count, as if they were one.
        tokens: of a known version of it; least, greatest: of these versions, -1 where there are
            no tokens.
        strangers: number of a policy that the recipe does not name and that sampled tokens, 0 if
            there is none.
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
    ids, policies = turns["turn_id"], turns["policy"].fill_null(policy).combine_chunks()
    whole = turns["one_version"].fill_null(False).to_numpy()
    foreign = np.flatnonzero(
        whole & (known > 0) & pc.not_equal(policies, policy).to_numpy(zero_copy_only=False)
    )
    parts: dict[int, Sequence[Span]] = {}
    for row, length, name in zip(
        foreign.tolist(), known[foreign].tolist(), policies.take(foreign), strict=True
    ):
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
    path_numbers = np.concatenate([of_path[~several], apart[:, 0]])
    versions = np.concatenate([lowest[paths.path[whole]], apart[:, 1]])
    tokens = np.concatenate([known[whole], apart[:, 2]])
    order = np.lexsort([versions, path_numbers])
    totals = np.bincount(path_numbers, tokens, count).astype(np.int64)
    some = totals > 0
    places = np.cumsum(totals) - totals + deciding_places(share, totals)
    deciding = np.full(count, -1, np.int64)
    deciding[some] = versions[order][np.searchsorted(np.cumsum(tokens[order]), places[some], side="right")]
    return deciding


def odd_rewards(
    rewards: Mapping[str, float], turns: pa.Table, paths: PathColumns, tokens: Ints
) -> npt.NDArray[np.float64]:
    """For each path the first turn reward that is not finite; 0 where it has none, float64 [N].

    Args:
        rewards: turn -> its reward.
        tokens: with loss, of each turn on each path: a turn without one has no reward there.
    """
    by_path = np.zeros(len(paths.starts) - 1)
    odd = {turn_id: reward for turn_id, reward in rewards.items() if not np.isfinite(reward)}
    if not odd:
        return by_path
    named = {row: odd[name] for row, name in enumerate(turns["turn_id"].to_pylist()) if name in odd}
    of_path = np.repeat(np.arange(len(by_path)), np.diff(paths.starts))
    for at in np.flatnonzero(np.isin(paths.path, list(named)) & (tokens > 0))[::-1]:
        by_path[of_path[at]] = named[int(paths.path[at])]
    return by_path


def in_turn_order(log: Store, cut: Cut, trajectories: pa.Table, turns: pa.Table) -> pa.Table:
    """The turns, with those of a trajectory that several lanes wrote in the order that the fold
    gives them.

    Args:
        trajectories, turns: as `References` has them.
    """
    lanes = turns.group_by("place").aggregate([("lane", "count_distinct")])
    several = lanes.filter(pc.greater(lanes["lane_count_distinct"], 1))["place"].to_pylist()
    if not several:
        return turns
    ids = {trajectories["trajectory_id"][place].as_py(): place for place in several}
    order = np.arange(turns.num_rows)
    at = turns["place"].to_numpy()
    for trajectory_id, trajectory in log.trajectories(cut, ids).items():
        mine = np.flatnonzero(at == ids[trajectory_id])
        names = turns["turn_id"].take(pa.array(mine)).to_pylist()
        places = {turn_id: place for place, turn_id in enumerate(trajectory.turns)}
        order[mine] = mine[np.argsort([places.get(name, len(places)) for name in names], kind="stable")]
    return turns.take(pa.array(order))


TOGETHER = 64
"""Trajectories that are read at a time: their records take some 30 times the room of their tokens."""

Texts = npt.NDArray[np.str_]


def routed_turns(log: Store, cut: Cut, trajectories: Iterable[str]) -> Iterator[tuple[str, Json, int]]:
    """The id, the experts and the end of its tokens in its path, for every turn of these
    trajectories with routed experts. Erased turns have none.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    ids = sorted(set(trajectories))
    for start in range(0, len(ids), TOGETHER):
        for trajectory in log.trajectories(cut, ids[start : start + TOGETHER]).values():
            for turn in trajectory.turns.values():
                done = turn.completed
                if done is not None and done.routed_experts and not turn.tokens_erased:
                    yield turn.turn_id, done.routed_experts, done.prompt_length + len(done.completion_ids)


def misrouted_paths(
    log: Store, cut: Cut, trajectories: pa.Table, turns: pa.Table, paths: PathColumns, mixture: Mixture | None
) -> Texts:
    """For each path why the model cannot replay what its turns record; empty if it can, or is not
    asked to.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    count = len(paths.starts) - 1
    if mixture is None or not count:
        return np.zeros(count, np.str_)
    check, ids = FitCheck(mixture), trajectories["trajectory_id"].to_pylist()
    routed = routed_turns(log, cut, ids)
    wrong = {turn_id: check.of_turn(turn_id, stored, end) for turn_id, stored, end in routed}
    each = [wrong.get(turn_id, "") for turn_id in turns["turn_id"].to_pylist()]
    bounds = zip(paths.starts[:-1].tolist(), paths.starts[1:].tolist(), strict=True)
    of_paths = (paths.path[start:end].tolist() for start, end in bounds)
    return np.array([next((each[row] for row in rows if each[row]), "") for rows in of_paths], np.str_)
