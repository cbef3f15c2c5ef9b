"""Trajectories to Samples: each root-to-leaf path as aligned arrays. Pure, and without torch.

Each sampled token belongs to exactly one sample (`fold.path_tokens` says to which).

The root-to-leaf paths of trajectories, from the columns of their turns, and which one of them is
trained on where a recipe takes only one. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.digest import digest_arrays
from rollbook.store.events import Json, TokenIds
from rollbook.store.fold.path_tokens import NO_VERSION, PathTokens, path_tokens
from rollbook.store.fold.paths import leaves, owned_paths, path_to
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.train.config.recipe import Paths

OF_ANOTHER = -2
"""In `versions`: another policy than the one in training sampled the token."""
TRUNCATED = "truncated"
"""Status of a trajectory that was cut off."""
CUT_OFF = "length"
"""Finish reason of a turn that was cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One path, as arrays of one length T.

    Attributes:
        turn_ids: from the root to the leaf; turn_ends: where each one's tokens end in the path.
        tokens: int32 [T].
        loss_mask: bool [T]; true where the token was sampled in this sample and may be trained.
        logprobs: float32 [T]; log-probability of the token when it was sampled; 0 where the mask is
            false, NaN where the engine gave none (a teacher).
        versions: int64 [T]; version of the policy in training that sampled the token; -1 where none is known,
            `OF_ANOTHER` where another policy did.
        temperatures: float32 [T]; temperature of the distribution `logprobs` are of (1 elsewhere).
        rewards: turn id -> reward, of the turns that have one.
        routed: turn id -> the experts that its tokens went to, packed as the log has them, of the turns that
            have any, from the root on; `train.select.routing` says which experts those of the path are.
        success, status: as the trajectory finished; None where that was not said, or it has not.
        truncated: whether the trajectory, or the last turn of the path, was cut off at its greatest length.
        erased: tokens of its path were erased (they are -1), so the mask is false where it was true.
        preferred: whether it is of a path that the recipe's `paths` takes.
        chosen: whether the recipe's conditions on trajectories hold.
        stranger: a policy that sampled a trained token, and that the recipe does not name; empty: none did.
        misrouted: why the model cannot replay `routed`; empty where it can, or nobody asked.
        cut_to: tokens that are left of a path that is longer than the model's context; None: all are.
        margin: by how much it was recorded as better than the sample after it, where a loss asks for that.
    """

    run: str
    trajectory_id: str
    name: str
    leaf_turn_id: str
    turn_ids: tuple[str, ...]
    turn_ends: tuple[int, ...]
    group: str | None
    split: str
    tokens: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    temperatures: npt.NDArray[np.float32]
    reward: float | None
    rewards: dict[str, float]
    success: bool | None = None
    truncated: bool = False
    erased: bool = False
    margin: float | None = None
    status: str | None = None
    preferred: bool = True
    chosen: bool = True
    routed: dict[str, Json] = field(default_factory=dict)
    misrouted: str = ""
    stranger: str = ""
    cut_to: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained(self) -> int:
        """Tokens with loss."""
        return int(self.loss_mask.sum())

    @property
    def learnable(self) -> int:
        """Tokens with loss, without the first token of the path, which nothing predicts."""
        return int(self.loss_mask[1:].sum())

    @property
    def length(self) -> int:
        """Tokens of the whole path."""
        return len(self.tokens)

    @property
    def lowest_token(self) -> int:
        """Least id among its tokens."""
        return int(self.tokens.min(initial=0))

    @property
    def highest_token(self) -> int:
        """Greatest id among its tokens."""
        return int(self.tokens.max(initial=0))

    @property
    def unknown(self) -> int:
        """Trained tokens of unknown policy version."""
        return int((self.versions[self.loss_mask] == NO_VERSION).sum())

    @property
    def exact(self) -> bool:
        """Whether each trained token has a logprob."""
        return not np.isnan(self.logprobs).any()

    @property
    def infinite(self) -> bool:
        """Whether the logprob of a trained token is infinite."""
        return bool(np.isinf(self.logprobs).any())

    @property
    def turn_reward(self) -> float:
        """The first reward of a trained turn of its path that is no number; 0 if all are."""
        turns = zip(self.turn_ids, self.turn_ends, strict=True)
        rewards = (self.rewards.get(turn, 0.0) for turn, end in turns if self.loss_mask[end - 1])
        return next((reward for reward in rewards if not np.isfinite(reward)), 0.0)

    @property
    def oldest_version(self) -> int | None:
        """Version of its oldest trained token, or None if none has a version."""
        known = self.versions[self.loss_mask & (self.versions >= 0)]
        return int(known.min()) if known.size else None

    @property
    def newest_version(self) -> int | None:
        """Version of its newest trained token, or None if none has a version."""
        known = self.versions[self.loss_mask & (self.versions >= 0)]
        return int(known.max()) if known.size else None

    def deciding_version(self, share: float) -> int | None:
        """The version by which more than this share of its trained tokens becomes too old; None if
        none has one."""
        known = np.sort(self.versions[self.loss_mask & (self.versions >= 0)])
        return int(known[deciding_places(share, np.array([known.size]))[0]]) if known.size else None

    @property
    def reference(self) -> Json:
        """Its name in a step's manifest."""
        named: Json = {"trajectory_id": self.trajectory_id, "turn_id": self.leaf_turn_id}
        named |= {} if self.cut_to is None else {"tokens": self.cut_to}
        return named if self.margin is None else named | {"margin": self.margin}

    def within(self, context: int) -> Sample:
        """The sample, cut to a context of so many tokens."""
        if len(self) <= context:
            return self
        turns = [t for t, begin in zip(self.turn_ids, (0, *self.turn_ends), strict=False) if begin < context]
        arrays = ("tokens", "loss_mask", "logprobs", "versions", "temperatures")
        return replace(
            self,
            turn_ids=tuple(turns),
            turn_ends=tuple(min(end, context) for end in self.turn_ends[: len(turns)]),
            cut_to=context,
            **{name: getattr(self, name)[:context] for name in arrays},
        )

    def digest(self) -> str:
        """Digest of all its arrays."""
        names = ("tokens", "loss_mask", "logprobs", "versions", "temperatures")
        return digest_arrays({name: getattr(self, name) for name in names})

    def as_json(self) -> Json:
        """Plain JSON values; NaN and -1 become null."""
        return {
            "run": self.run,
            "trajectory": self.name,
            "trajectory_id": self.trajectory_id,
            "leaf_turn_id": self.leaf_turn_id,
            "turn_ids": list(self.turn_ids),
            "group": self.group,
            "split": self.split,
            "reward": self.reward,
            "turn_rewards": self.rewards,
            "erased": self.erased,
            "tokens": self.tokens.tolist(),
            "loss_mask": self.loss_mask.astype(int).tolist(),
            "logprobs": [None if p != p else p for p in self.logprobs.tolist()],
            "policy_versions": [None if v < 0 else v for v in self.versions.tolist()],
            "digest": self.digest(),
        }


def deciding_places(share: float, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each number of tokens, in order of their versions, the position of the one that decides
    on staleness.

    More than `share` of the tokens are older than a version exactly if that one is; with a share
    of 1, if all are.
    """
    return np.minimum(np.floor(share * counts + 1e-9).astype(np.int64), counts - 1)


def samples_of(
    trajectory: Trajectory,
    source: str = "agent",
    paths: Paths = "all",
    *,
    chosen: bool = True,
    policy: str | None = None,
    others: Collection[str] = (),
) -> Iterator[Sample]:
    """The samples of a trajectory, one per root-to-leaf path, leaves in turn order.

    Turns that were not delivered, or failed, are context without loss, and so are those whose
    logprobs are of altered logits (a constraint, a penalty); a path with erased tokens has no
    loss at all. Rewards are those of `source`. `paths` is the recipe's: a preferred leaf owns
    its whole path, and the other leaves are not preferred. `chosen` says whether the recipe's
    conditions hold. Versions are those of `policy` (None: of any), and `others` are policies
    that the recipe names beside it.
    """
    before = preferred_turn(paths, trajectory)
    for path in path_tokens(trajectory, before):
        preferred = before in (None, path.turns[-1].turn_id)
        sample = _sample(trajectory, path, source, preferred=preferred, chosen=chosen)
        yield sample if policy is None else _of_policy(sample, path, policy, others)


def _of_policy(sample: Sample, path: PathTokens, policy: str, others: Collection[str]) -> Sample:
    """The sample with only the versions of one policy."""
    strangers: set[str] = set()
    for turn, place in path.sampled:
        assert turn.completed is not None
        for span in turn.completed.version_spans:
            if span.policy != policy:
                at = slice(place.start + span.start, place.start + span.end)
                sample.versions[at] = OF_ANOTHER
                if span.policy not in others and sample.loss_mask[at].any():
                    strangers.add(span.policy)
    return replace(sample, stranger=max(strangers)) if strangers else sample


def _sample(
    trajectory: Trajectory, path: PathTokens, source: str, *, preferred: bool, chosen: bool
) -> Sample:
    loss_mask, logprobs = path.loss_mask, path.logprobs
    temperatures = np.ones(len(path.tokens), np.float32)
    for turn, place in path.sampled:
        assert turn.completed is not None
        if turn.completed.logprob_semantics.get("altered"):
            # Logprobs of masked or penalized logits cannot be reproduced by the trainer.
            loss_mask[place], logprobs[place] = False, 0.0
        temperature = float(turn.completed.logprob_semantics.get("temperature", 1.0))
        temperatures[place] = temperature or 1.0  # greedy turns report the T=1 distribution
    # A path without trainable tokens before the erasure lost nothing by it.
    erased = any(turn.tokens_erased for turn in path.turns) and bool(loss_mask.any())
    if erased:
        loss_mask, logprobs = np.zeros_like(loss_mask), np.zeros_like(logprobs)
    finished, leaf = trajectory.finished, path.turns[-1].completed
    rewards = {t.turn_id: trajectory.reward(source, t.turn_id) for t in path.turns}
    return Sample(
        run=trajectory.run,
        trajectory_id=trajectory.opened.trajectory_id,
        name=trajectory.opened.name,
        leaf_turn_id=path.turns[-1].turn_id,
        turn_ids=tuple(turn.turn_id for turn in path.turns),
        turn_ends=path.ends,
        group=trajectory.opened.group,
        split=trajectory.split,
        tokens=path.tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=path.versions,
        temperatures=temperatures,
        reward=trajectory.reward(source),
        rewards={turn_id: value for turn_id, value in rewards.items() if value is not None},
        success=None if finished is None else finished.success,
        truncated=(finished is not None and finished.status == TRUNCATED)
        or (leaf is not None and leaf.finish_reason == CUT_OFF),
        erased=erased,
        status=None if finished is None else finished.status,
        preferred=preferred,
        chosen=chosen,
        routed=_routed(path),
    )


def _routed(path: PathTokens) -> dict[str, Json]:
    """Turn id -> its routed experts, for the path's turns that have any; erased ones have none."""
    turns = ((turn, turn.completed) for turn in path.turns if not turn.tokens_erased)
    return {turn.turn_id: done.routed_experts for turn, done in turns if done and done.routed_experts}


def of_another_run(sample: Sample) -> Sample:
    """The sample for the training of another run, without versions of that run."""
    return replace(sample, versions=np.full_like(sample.versions, NO_VERSION))


def all_samples(trajectories: Iterable[Trajectory], source: str = "agent") -> list[Sample]:
    """Every sample of the trajectories, in their order."""
    return [sample for trajectory in trajectories for sample in samples_of(trajectory, source)]


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PathColumns:
    """The start of each path, the rows of its turns, which of them it owns, and whether the path is
    one that is taken."""

    starts: Ints
    path: Ints
    owned: Bools
    preferred: Bools


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums, minima and maxima over consecutive runs of an array, with boundaries `starts`, the end
    included; each run has at least one value."""

    starts: Ints

    def sum(self, values: npt.NDArray[Any]) -> Ints:
        """The sum of each."""
        return np.add.reduceat(values.astype(np.int64), self.starts[:-1]) if len(self.starts) > 1 else _EMPTY

    def least(self, values: Ints) -> Ints:
        """The least value of each."""
        return np.minimum.reduceat(values, self.starts[:-1]) if len(self.starts) > 1 else _EMPTY

    def greatest(self, values: Ints) -> Ints:
        """The greatest value of each."""
        return np.maximum.reduceat(values, self.starts[:-1]) if len(self.starts) > 1 else _EMPTY


_EMPTY = np.empty(0, np.int64)


def path_columns(turns: pa.Table, rule: Paths = "all") -> PathColumns:
    """Every path of each trajectory; paths of trajectories that never branch are consecutive rows
    of the table.

    Args:
        rule: which paths are taken.
    """
    place = turns["place"].to_numpy()
    if not len(place):
        none = np.empty(0, np.bool_)
        return PathColumns(np.zeros(1, np.int64), np.empty(0, np.int64), none, none)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    ends = np.append(begins[1:], len(place))
    straight = _straight(turns, begins)
    lengths, path, owned, preferred = list[Ints](), list[Ints](), list[Bools](), list[Bools]()
    at = 0
    for number in [*map(int, np.flatnonzero(~straight)), len(begins)]:
        if at < number:
            lengths.append(ends[at:number] - begins[at:number])
            path.append(np.arange(begins[at], ends[number - 1]))
            owned.append(np.ones(len(path[-1]), np.bool_))
            preferred.append(np.ones(number - at, np.bool_))
        if number < len(begins):
            whole = slice(int(begins[number]), int(ends[number]))
            parents = _parents(turns, whole.start, whole.stop)
            before = preferred_leaf(rule, parents, *_deciding(turns[whole]))
            for owned_path in owned_paths(parents, before):
                lengths.append(np.array([len(owned_path.nodes)]))
                path.append(begins[number] + np.array(owned_path.nodes))
                owned.append(np.array(owned_path.owned))
                preferred.append(np.array([before in (None, owned_path.nodes[-1])]))
        at = number + 1
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    return PathColumns(starts, np.concatenate(path), np.concatenate(owned), np.concatenate(preferred))


def _deciding(turns: pa.Table) -> tuple[list[int], list[bool]]:
    """For each turn, the number of tokens that can be trained, and whether it was delivered."""
    delivered = turns["delivered"].to_pylist()
    rows = zip(delivered, turns["altered"].to_pylist(), turns["completion_length"].to_pylist(), strict=True)
    return [length or 0 if had and not altered else 0 for had, altered, length in rows], delivered


def _straight(turns: pa.Table, begins: Ints) -> Bools:
    """For each trajectory, whether its first turn is a root and each other turn extends the one
    before it."""
    ids, parents = turns["turn_id"].combine_chunks(), turns["parent_turn_id"].combine_chunks()
    before = pa.concat_arrays([ids.slice(0, 1), ids.slice(0, len(ids) - 1)])
    extends = pc.fill_null(pc.equal(parents, before), False).to_numpy(zero_copy_only=False).copy()
    extends[begins] = parents.is_null().to_numpy(zero_copy_only=False)[begins]
    return np.logical_and.reduceat(extends, begins)


def _parents(turns: pa.Table, begin: int, end: int) -> list[int]:
    """Position of each turn's parent within its trajectory, -1 for a root."""
    ids = turns["turn_id"].slice(begin, end - begin).to_pylist()
    places = {turn_id: place for place, turn_id in enumerate(ids)}
    named = turns["parent_turn_id"].slice(begin, end - begin).to_pylist()
    return [places.get(parent, -1) for parent in named]


def preferred_leaf(
    rule: Paths, parents: Sequence[int], tokens: Sequence[int], delivered: Sequence[bool]
) -> int | None:
    """The leaf that owns its whole path, and is the only one trained on; None where all are.

    Args:
        parents: position of each completed turn's parent, -1 for a root.
        tokens: that can be trained, of each turn.
        delivered: whether the client had the turn; leaves that it had count as later than all
            others.
    """
    if rule == "all" or not len(parents):
        return None
    ends = leaves(parents)
    if rule == "last":
        return max(ends, key=lambda leaf: (bool(delivered[leaf]), leaf))
    return max(ends, key=lambda leaf: (sum(tokens[turn] for turn in path_to(leaf, parents)), leaf))


def preferred_turn(rule: Paths, trajectory: Trajectory) -> str | None:
    """The same for a folded trajectory, by the leaf's turn id."""
    if rule == "all":
        return None
    done, parents = trajectory.completed()
    leaf = preferred_leaf(
        rule, parents, [_tokens(turn) for turn in done], [bool(turn.delivered) for turn in done]
    )
    return None if leaf is None else done[leaf].turn_id


def _tokens(turn: Turn) -> int:
    assert turn.completed is not None
    altered = turn.completed.logprob_semantics.get("altered")
    return len(turn.completed.completion_ids) if turn.delivered and not altered else 0
