"""Which samples a log holds at a cut, as columns: what each is made of, and what decides whether it is used.

No event is decoded for this: it comes from the scalars of turns (`store.sql`), which sealed units keep ready.
Tokens are read when a sample is used: `train.data.materialize`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import ConfigError
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection
from rollbook.train.config.recipe import STATUSES, RecipeConfig
from rollbook.train.data.conditions import conditions_of
from rollbook.train.data.deciding import (
    Spans,
    Versions,
    deciding_versions,
    odd_rewards,
    spans_of_several,
    versions_of,
)
from rollbook.train.data.numbering import numbered
from rollbook.train.data.path_columns import Bools, Ints, PathColumns, Sums, path_columns
from rollbook.train.data.recipe import NO_STATUS, NOWHERE, Candidates
from rollbook.train.data.routed_turns import Texts, misrouted_paths
from rollbook.train.data.routing import Mixture
from rollbook.train.data.sample_ref import SampleRef
from rollbook.train.data.samples import CUT_OFF, TRUNCATED
from rollbook.train.data.turn_order import in_turn_order

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
        """With no path of these trajectories preferred."""
        ids = self.trajectories["trajectory_id"]
        these = pc.is_in(ids, pa.array(sorted(trajectories), pa.string())).to_numpy(zero_copy_only=False)
        return replace(self, preferred=self.preferred & ~these[self.trajectory])

    def candidates(self) -> tuple[Ints, Candidates]:
        """The samples that a recipe speaks of, by number, and what it decides by."""
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
        """Samples by name, by their numbers."""
        at = np.asarray(samples, np.int64)
        named = self.trajectories.select(_NAMED).take(pa.array(self.trajectory[at])).to_pylist()
        leaves = self.turns["turn_id"].take(pa.array(self.leaf[at])).to_pylist()
        return [
            SampleRef(
                leaf_turn_id=leaf,
                trained=int(self.trained_tokens[sample]),
                unknown=int(self.unknown[sample]),
                exact=bool(self.exact[sample]),
                oldest_version=None if self.oldest[sample] == NOWHERE else int(self.oldest[sample]),
                newest_version=None if self.newest[sample] == NOWHERE else int(self.newest[sample]),
                deciding=None if self.deciding[sample] == NOWHERE else int(self.deciding[sample]),
                truncated=bool(self.truncated[sample]),
                erased=bool(self.erased[sample]),
                preferred=bool(self.preferred[sample]),
                infinite=bool(self.infinite[sample]),
                turn_reward=float(self.turn_reward[sample]),
                length=int(self.length[sample]),
                lowest_token=int(self.lowest[sample]),
                highest_token=int(self.highest[sample]),
                learnable=int(self.learnable[sample]),
                misrouted=str(self.misrouted[sample]),
                stranger=str(self.stranger[sample]),
                **names,
            )
            for sample, leaf, names in zip(at.tolist(), leaves, named, strict=True)
        ]

    def ref(self, sample: int) -> SampleRef:
        """One sample by name."""
        return self.refs([sample])[0]


_NAMED = ["run", "trajectory_id", "name", "group", "split", "reward", "success", "status", "chosen"]


def find_references(
    log: Store,
    cut: Cut,
    run: str,
    recipe: RecipeConfig,
    without: Collection[str] = (),
    mixture: Mixture | None = None,
    policy: str | None = None,
) -> References:
    """The samples that a recipe may choose from at a cut: of finished trajectories of its runs and splits.

    Args:
        run: that is trained; tokens of others have no version of its own.
        without: trajectories that are left out.
        mixture: of a model that is to replay the routing that turns record; None: nobody asks.
        policy: in training; None: versions of all policies count, as if they were one.

    Raises:
        CorruptionError: a file is damaged.
        ConfigError: a condition is not SQL, or is no condition on the view `trajectories`.
    """
    with connect_at(log, format_cut(cut)) as connection:
        return references_over(connection, log, cut, run, recipe, without, mixture, policy)


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
    """`find_references` over a connection to the log at the cut, for who asks it other things too.

    Raises:
        CorruptionError, ConfigError: as `find_references`.
    """
    conditions = conditions_of(recipe)
    holds = "true" if conditions is None else f"o.trajectory_id IN ({conditions.sql})"
    ids = pa.array(sorted(without), pa.string())
    connection.register("left_out", pa.table({"trajectory_id": ids}))
    given = {"runs": list(recipe.runs(run)), "source": recipe.reward_source}
    chosen = given | {"own": run, "splits": sorted(recipe.splits)}
    chosen |= {} if conditions is None else conditions.parameters
    try:
        query = _TRAJECTORIES.replace("{chosen}", holds)
        trajectories = connection.sql(query, params=chosen).to_arrow_table().combine_chunks()
    except duckdb.Error as error:
        if conditions is None:
            raise
        raise ConfigError(f"recipe.where {conditions.said!r}: {error}") from error
    places = pa.array(np.arange(trajectories.num_rows, dtype=np.int64))
    connection.register("chosen", trajectories.select(["trajectory_id"]).append_column("place", places))
    turns = connection.sql(_TURNS).to_arrow_table().combine_chunks()
    rewards = dict(connection.execute(_TURN_REWARDS, given).fetchall())
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
    """Of each turn on each path whether the client had it, and whether it has loss; of each path whether its
    loss was erased."""
    of_sample, path = Sums(paths.starts), paths.path
    sampled = paths.owned & _flags(turns, "delivered")[path]
    trained = sampled & ~_flags(turns, "altered")[path]
    lost = np.where(trained, _numbers(turns, "completion_length")[path], 0)
    spoiled = (of_sample.sum(_flags(turns, "erased")[path]) > 0) & (of_sample.sum(lost) > 0)
    return sampled, trained & ~np.repeat(spoiled, np.diff(paths.starts)), spoiled


def _truncated(trajectories: pa.Table, turns: pa.Table, leaf: Ints) -> Bools:
    """Of each leaf whether it, or its trajectory, was cut off at its greatest length."""
    cut_off = np.asarray(pc.equal(turns["finish_reason"], CUT_OFF).fill_null(False).to_numpy(), np.bool_)
    ended = np.asarray(pc.equal(trajectories["status"], TRUNCATED).fill_null(False).to_numpy(), np.bool_)
    return cut_off[leaf] | ended[turns["place"].to_numpy()[leaf]]


def _versions(
    turns: pa.Table, paths: PathColumns, versions: Versions, trained: Bools, share: float, spans: Spans
) -> tuple[Ints, Ints, Ints]:
    """Of each path the versions of its oldest and its newest token, and the one that decides on staleness."""
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
    """Places of statuses among `STATUSES`; `NO_STATUS` for any other."""
    places = pc.index_in(status, value_set=pa.array(STATUSES))
    return np.asarray(places.fill_null(NO_STATUS).to_numpy(), np.int64)


def _flags(table: pa.Table, name: str) -> Bools:
    return np.asarray(table[name].fill_null(False).to_numpy(), np.bool_)


def _finite(sums: pa.ChunkedArray) -> Bools:
    return np.asarray(pc.is_finite(sums.cast(pa.float64())).fill_null(True).to_numpy(), np.bool_)


def _numbers(table: pa.Table, name: str) -> Ints:
    return np.asarray(table[name].fill_null(0).to_numpy(), np.int64)
