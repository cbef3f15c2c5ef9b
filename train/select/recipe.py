"""Applies a recipe: which candidates are trained on, and which rule drops each of the others. Pure.

Samples of another split, or without a trainable token, are not candidates: the ledger counts
them as kept out. A candidate is kept, or dropped by exactly one named rule. Candidates with
erased tokens, and those that do not fit the model, are always dropped. Whether rewards of a
group differ is decided on the members that are left. Of a group a recipe uses the best samples,
all that differ, or the best and the worst. Where samples are ranked, a sample without a group is
a group of its trajectory alone.

Rules run on columns, so that no object per sample is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollbook.store.cut import Cut, format_cut
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.recipe import STATUSES, RecipeConfig
from rollbook.train.select.routing import Mixture
from rollbook.train.select.sample_ref import NO_GROUP, numbered

NOWHERE = -1
"""Stands for an unknown version."""
NO_STATUS = -1
"""Stands for a status that is none of `STATUSES`."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Candidate(Protocol):
    """A sample, or a reference to one, with the values that a recipe decides by."""

    @property
    def run(self) -> str: ...
    @property
    def trajectory_id(self) -> str: ...
    @property
    def leaf_turn_id(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def trained(self) -> int: ...
    @property
    def unknown(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def oldest_version(self) -> int | None: ...
    @property
    def newest_version(self) -> int | None: ...
    @property
    def stranger(self) -> str: ...
    def deciding_version(self, share: float) -> int | None: ...
    @property
    def success(self) -> bool | None: ...
    @property
    def status(self) -> str | None: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def chosen(self) -> bool: ...
    @property
    def preferred(self) -> bool: ...
    @property
    def infinite(self) -> bool: ...
    @property
    def turn_reward(self) -> float: ...
    @property
    def erased(self) -> bool: ...
    @property
    def learnable(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def lowest_token(self) -> int: ...
    @property
    def highest_token(self) -> int: ...
    @property
    def misrouted(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The values of N samples that a recipe decides by; every array is [N].

    Attributes:
        groups: numbers from 0, or `NO_GROUP`; trajectories: numbers from 0.
        rewards: float64, of no meaning where `rewarded` is false.
        succeeded: as they finished; false where that is not known, and so is `failed`.
        status: as they finished, as places in `STATUSES`, or `NO_STATUS`.
        preferred: whether they are of a path that the recipe takes.
        infinite: whether a trained token's logprob is.
        turn_rewards: float64, the first reward of a trained turn that is no number, or 0.
        chosen: whether the recipe's SQL conditions hold.
        unknown: number of trained tokens of unknown version.
        strangers: str, a policy that sampled a trained token, and that the recipe does not name, or empty.
        oldest, newest: versions of the oldest and the newest token of the policy in training, or `NOWHERE`;
            deciding: that by which it becomes too old.
        exact: whether each trained token has a logprob.
        learnable: number of trained tokens that are not the first of the path; lengths: of whole paths, in
            tokens.
        lowest, highest: ids among the path's tokens.
        misrouted: str, why the model cannot replay the routing that the path's turns record; empty: it can.
    """

    groups: Ints
    trajectories: Ints
    succeeded: Bools
    failed: Bools
    status: Ints
    preferred: Bools
    infinite: Bools
    turn_rewards: npt.NDArray[np.float64]
    chosen: Bools
    rewards: npt.NDArray[np.float64]
    rewarded: Bools
    unknown: Ints
    strangers: npt.NDArray[np.str_]
    oldest: Ints
    newest: Ints
    deciding: Ints
    exact: Bools
    erased: Bools
    learnable: Ints
    lengths: Ints
    lowest: Ints
    highest: Ints
    misrouted: npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """A candidate dropped from training, the rule that dropped it, and the numbers that the rule
    compared.

    Attributes:
        decided: the trainer's version, and the cut as it is written, by which that was decided;
            None: those of the plan that it is recorded with.
    """

    sample: Candidate
    rule: str
    detail: Json
    decided: tuple[int, str] | None = None


def mark_decided(drops: Iterable[Drop], version: int, cut: Cut) -> list[Drop]:
    """The drops, marked as decided by this version at this cut, unless they are marked already."""
    at = version, format_cut(cut)
    return [drop if drop.decided is not None else replace(drop, decided=at) for drop in drops]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model's input: token ids below `vocabulary`, and at most `context` tokens.

    `mixture` is what recorded routing has to fit; None: it is not replayed.
    """

    vocabulary: int
    context: int
    mixture: Mixture | None = None


def mixture_in(limits: ModelLimits | None) -> Mixture | None:
    """The mixture of experts in the limits, if these are known."""
    return None if limits is None else limits.mixture


UNLIMITED = ModelLimits(2**63 - 1, 2**63 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class RuleContext:
    """The settings against which rules check candidates."""

    recipe: RecipeConfig
    algorithm: Algorithm
    version: int
    limits: ModelLimits


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: which candidates it drops, and the details recorded for each."""

    drops: Callable[[Candidates, RuleContext], Bools]
    detail: Callable[[Candidates, RuleContext, int], Json] = lambda of, held, at: {}


def _compares_policies(held: RuleContext) -> bool:
    """Whether it matters which policy sampled a token: not where the trained model samples none."""
    return held.recipe.other_policies is not None and not held.algorithm.head_width


def _of_another_policy(candidates: Candidates, held: RuleContext) -> Bools:
    return np.asarray((candidates.strangers != "") & _compares_policies(held), np.bool_)


def _too_new(candidates: Candidates, held: RuleContext) -> Bools:
    return (candidates.newest > held.version) & (_compares_policies(held) and held.recipe.counts_ages)


def _too_old(candidates: Candidates, held: RuleContext) -> Bools:
    limit = held.recipe.max_staleness
    if limit is None:
        return np.zeros(len(candidates.oldest), np.bool_)
    return (candidates.deciding < held.version - limit) & (candidates.deciding != NOWHERE)


def _age(candidates: Candidates, held: RuleContext, at: int) -> Json:
    oldest = int(candidates.oldest[at])
    detail = {"staleness": held.version - oldest, "max_staleness": held.recipe.max_staleness}
    share = held.recipe.stale_share
    return detail | {"oldest_version": oldest} | ({"stale_share": share} if share else {})


def _another_end(candidates: Candidates, held: RuleContext) -> Bools:
    wanted = held.recipe.success
    if wanted is None:
        return np.zeros_like(candidates.chosen)
    return ~candidates.succeeded if wanted else ~candidates.failed


def _of_another_status(candidates: Candidates, held: RuleContext) -> Bools:
    wanted = held.recipe.statuses
    if wanted is None:
        return np.zeros_like(candidates.chosen)
    return ~np.isin(candidates.status, [STATUSES.index(status) for status in wanted])


def _status(candidates: Candidates, held: RuleContext, at: int) -> Json:
    status = None if candidates.status[at] == NO_STATUS else STATUSES[candidates.status[at]]
    return {"status": status, "statuses": list(held.recipe.statuses or ())}


def _too_little(candidates: Candidates, held: RuleContext) -> Bools:
    least = held.recipe.min_reward
    return (
        np.zeros_like(candidates.chosen)
        if least is None
        else ~(candidates.rewarded & (candidates.rewards >= least))
    )


def _reward(candidates: Candidates, held: RuleContext, at: int) -> Json:
    reward = float(candidates.rewards[at]) if candidates.rewarded[at] else None
    return {"reward": reward, "min_reward": held.recipe.min_reward}


def _odd_reward(candidates: Candidates, held: RuleContext, at: int) -> Json:
    if not np.isfinite(candidates.rewards[at]):
        return {"reward": str(float(candidates.rewards[at]))}
    return {"turn_reward": str(float(candidates.turn_rewards[at]))}


def _where_needed(need: str, mask: Bools, held: RuleContext) -> Bools:
    return mask if need in held.algorithm.needs else np.zeros_like(mask)


def _ambiguous(candidates: Candidates, held: RuleContext) -> Bools:
    several = "pairs" in held.algorithm.needs and held.recipe.paths == "all"
    return in_several(candidates.trajectories) if several else np.zeros_like(candidates.chosen)


def _outside(candidates: Candidates, held: RuleContext) -> Bools:
    return (candidates.lowest < 0) | (candidates.highest >= held.limits.vocabulary)


def _token(candidates: Candidates, held: RuleContext, at: int) -> Json:
    token = candidates.lowest[at] if candidates.lowest[at] < 0 else candidates.highest[at]
    return {"token": int(token), "vocabulary": held.limits.vocabulary}


RULES: Mapping[str, Rule] = {
    # A path decides by itself which of a trajectory's tokens are its own, so this rule is the first.
    "other_path": Rule(lambda of, held: ~of.preferred, lambda of, held, at: {"paths": held.recipe.paths}),
    "erased": Rule(lambda of, held: of.erased),
    "nothing_trainable": Rule(
        lambda of, held: of.learnable == 0, lambda of, held, at: {"tokens": int(of.lengths[at])}
    ),
    "outside_vocabulary": Rule(_outside, _token),
    "too_long": Rule(
        lambda of, held: (of.lengths > held.limits.context) & (held.recipe.too_long == "drop"),
        lambda of, held, at: {"tokens": int(of.lengths[at]), "context": held.limits.context},
    ),
    "misrouted": Rule(
        lambda of, held: of.misrouted != "", lambda of, held, at: {"record": str(of.misrouted[at])}
    ),
    "not_chosen": Rule(lambda of, held: ~of.chosen),
    "status": Rule(_of_another_status, _status),
    "success": Rule(_another_end, lambda of, held, at: {"wanted": held.recipe.success}),
    "other_policy": Rule(
        _of_another_policy,
        lambda of, held, at: {
            "policy": str(of.strangers[at]),
            "other_policies": list(held.recipe.other_policies or ()),
        },
    ),
    # A version that is still to be made: of weights that were given up, or of another line of them.
    "newer_version": Rule(
        _too_new, lambda of, held, at: {"newest_version": int(of.newest[at]), "version": held.version}
    ),
    "staleness": Rule(_too_old, _age),
    # Importance ratios need the probability under the sampling policy, which is unknown without a version.
    # SFT needs no version.
    "no_version": Rule(
        lambda of, held: _where_needed("logprobs", of.unknown > 0, held),
        lambda of, held, at: {"tokens": int(of.unknown[at])},
    ),
    "no_reward": Rule(
        lambda of, held: _where_needed("rewards", ~of.rewarded, held),
        lambda of, held, at: {"source": held.recipe.reward_source},
    ),
    "min_reward": Rule(_too_little, _reward),
    "reward_not_finite": Rule(
        lambda of, held: (
            _where_needed("rewards", ~np.isfinite(of.rewards), held)
            | _where_needed("turn_rewards", ~np.isfinite(of.turn_rewards), held)
        ),
        _odd_reward,
    ),
    "no_logprobs": Rule(lambda of, held: _where_needed("logprobs", ~of.exact, held)),
    "logprob_not_finite": Rule(lambda of, held: _where_needed("logprobs", of.infinite, held)),
    # A preference is between trajectories: of one with several samples it does not say which is meant.
    "several_paths": Rule(_ambiguous),
}
"""The rules by name, in the order in which they are applied: the first that matches counts."""


def is_candidate(sample: Candidate, recipe: RecipeConfig) -> bool:
    """Whether the sample is a candidate: of the recipe's splits, with a trainable token."""
    return sample.split in recipe.splits and (sample.erased or sample.trained > 0)


def columns_of(candidates: Sequence[Candidate], share: float) -> Candidates:
    """The values of candidates as columns; `share` is the recipe's deciding share."""
    oldest, newest, deciding = (
        [candidate.oldest_version for candidate in candidates],
        [candidate.newest_version for candidate in candidates],
        [candidate.deciding_version(share) for candidate in candidates],
    )
    return Candidates(
        groups=numbered([candidate.group for candidate in candidates]),
        rewards=np.array([np.nan if c.reward is None else c.reward for c in candidates], np.float64),
        trajectories=numbered([candidate.trajectory_id for candidate in candidates]),
        succeeded=np.array([candidate.success is True for candidate in candidates], np.bool_),
        failed=np.array([candidate.success is False for candidate in candidates], np.bool_),
        status=np.array(
            [
                STATUSES.index(candidate.status) if candidate.status in STATUSES else NO_STATUS
                for candidate in candidates
            ],
            np.int64,
        ),
        preferred=np.array([candidate.preferred for candidate in candidates], np.bool_),
        infinite=np.array([candidate.infinite for candidate in candidates], np.bool_),
        turn_rewards=np.array([candidate.turn_reward for candidate in candidates], np.float64),
        chosen=np.array([candidate.chosen for candidate in candidates], np.bool_),
        rewarded=np.array([candidate.reward is not None for candidate in candidates], np.bool_),
        unknown=np.array([candidate.unknown for candidate in candidates], np.int64),
        strangers=np.array([candidate.stranger for candidate in candidates], np.str_),
        oldest=_versions(oldest),
        newest=_versions(newest),
        deciding=_versions(deciding),
        exact=np.array([candidate.exact for candidate in candidates], np.bool_),
        erased=np.array([candidate.erased for candidate in candidates], np.bool_),
        learnable=np.array([candidate.learnable for candidate in candidates], np.int64),
        lengths=np.array([candidate.length for candidate in candidates], np.int64),
        lowest=np.array([candidate.lowest_token for candidate in candidates], np.int64),
        highest=np.array([candidate.highest_token for candidate in candidates], np.int64),
        misrouted=np.array([candidate.misrouted for candidate in candidates], np.str_),
    )


def _versions(versions: Sequence[int | None]) -> Ints:
    return np.array([NOWHERE if version is None else version for version in versions], np.int64)


_AT_ONCE = 1 << 15
"""Samples that are compared together: their columns stay in a core's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Each sample's group number, or `NO_GROUP`, its trajectory's number, and its reward; arrays
    are [N]."""

    groups: Ints
    trajectories: Ints
    rewards: npt.NDArray[np.float64]


def below_top(members: Members, left: Bools, fraction: float) -> Bools:
    """The samples left that do not belong to their group's best trajectories; among equal rewards
    the first count as better."""
    at = np.flatnonzero(left)
    groups, trajectories = _group_or_trajectory(members, at), members.trajectories[at]
    first = np.unique(trajectories, return_index=True)[1]
    order = first[np.lexsort((first, -members.rewards[at][first], groups[first]))]
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    rank = np.arange(len(order)) - np.repeat(begins, sizes)
    best = rank < np.repeat(np.maximum(np.ceil(fraction * sizes - 1e-9), 1), sizes)
    below = left.copy()
    below[at] = np.isin(trajectories, trajectories[order[best]], invert=True)
    return below


def members_left(members: Members, left: Bools) -> Ints:
    """For each sample left, how many trajectories of its group are left; [N]."""
    at = np.flatnonzero(left)
    groups = _group_or_trajectory(members, at)
    first = np.unique(members.trajectories[at], return_index=True)[1]
    counts = np.zeros(len(left), np.int64)
    counts[at] = np.bincount(groups[first], minlength=int(groups.max(initial=0)) + 1)[groups]
    return counts


def flat(members: Members, left: Bools, compared: Bools) -> Bools:
    """The samples left whose group has all rewards equal; those without a group are one group.

    All rewards of a group are equal if each equals one of them, whichever that is.

    Args:
        compared: those whose rewards count; all that are left are among them.
    """
    count = int(members.groups.max(initial=NO_GROUP)) + 2  # the last is NO_GROUP's, which is -1
    any_reward, differ, equal = np.empty(count), np.zeros(count, np.bool_), np.empty_like(left)
    pieces = [slice(at, at + _AT_ONCE) for at in range(0, len(left), _AT_ONCE)]
    for piece in pieces:
        at = np.flatnonzero(compared[piece])
        any_reward[members.groups[piece][at]] = members.rewards[piece][at]
    for piece in pieces:
        unequal = (members.rewards[piece] != any_reward[members.groups[piece]]) & compared[piece]
        differ[members.groups[piece][np.flatnonzero(unequal)]] = True
    for piece in pieces:
        equal[piece] = left[piece] & ~differ[members.groups[piece]]
    return equal


def best_and_worst(members: Members, left: Bools) -> Ints:
    """The sample with the greatest and the one with the least reward of each group, [P, 2], groups
    in the order of their first sample.

    Among equal rewards the first counts. Groups of one trajectory, and groups whose rewards are
    all equal, have no pair.
    """
    at = np.flatnonzero(left)
    groups, rewards = _group_or_trajectory(members, at), members.rewards[at]
    if not len(at):
        return np.zeros((0, 2), np.int64)
    ranked = np.lexsort((np.arange(len(at)), -rewards, groups))
    rising = np.lexsort((np.arange(len(at)), rewards, groups))
    begins = np.flatnonzero(np.diff(groups[ranked], prepend=-1))
    best, worst = ranked[begins], rising[begins]
    differ = rewards[best] > rewards[worst]
    pairs = np.stack([at[best], at[worst]], axis=1)[differ]
    first = np.minimum.reduceat(ranked, begins)[differ]
    return pairs[np.argsort(first)]


def in_several(trajectories: Ints) -> Bools:
    """Whether a sample's trajectory has more than one sample, [N]."""
    return np.asarray(np.bincount(trajectories)[trajectories] > 1, np.bool_)


def _group_or_trajectory(members: Members, at: Ints) -> Ints:
    """A number for the group of each sample, or for its trajectory where it has none."""
    groups = members.groups[at]
    alone = groups.max(initial=NO_GROUP) + 1 + members.trajectories[at]
    return np.asarray(np.where(groups == NO_GROUP, alone, groups), np.int64)
