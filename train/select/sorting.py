"""Sorts the candidates of folded trajectories by a recipe: which are trained on, and which rule drops each of
the others. Pure.

Rules that look at one sample at a time come first, then those that compare what is left of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from rollbook.store.events import Json
from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.conditions import chooses
from rollbook.train.select.drops import Dropped, Drops
from rollbook.train.select.recipe import (
    RULES,
    UNLIMITED,
    Bools,
    Candidate,
    Candidates,
    Drop,
    Ints,
    Members,
    ModelLimits,
    RuleContext,
    below_top,
    best_and_worst,
    columns_of,
    flat,
    is_candidate,
    members_left,
)
from rollbook.train.select.routing import FitCheck
from rollbook.train.select.samples import Sample, samples_of

C = TypeVar("C", bound=Candidate)


def sort_out(
    candidates: Candidates,
    recipe: RecipeConfig,
    algorithm: Algorithm,
    version: int,
    limits: ModelLimits | None = None,
    *,
    whole_groups: bool = True,
) -> tuple[Ints, Drops]:
    """Indexes of the candidates to train on, in order, and what is dropped of the others, by index.

    Args:
        version: the trainer's input policy version.
        limits: of the model; None where they are not known, and so not held against anything.
        whole_groups: whether the candidates of groups are all there, so that they can be compared.
    """
    held = RuleContext(recipe, algorithm, version, limits or UNLIMITED)
    left = np.ones(len(candidates.erased), np.bool_)
    alone: list[Dropped] = []
    for name, rule in RULES.items():
        dropped = rule.drops(candidates, held) & left
        if dropped.any():
            alone.append(Dropped(name, np.flatnonzero(dropped), partial(rule.detail, candidates, held)))
            left &= ~dropped
    kept, compared = _of_groups(candidates, left, held) if whole_groups else (np.flatnonzero(left), [])
    return kept, Drops(tuple(alone), tuple(compared))


def _of_groups(candidates: Candidates, left: Bools, held: RuleContext) -> tuple[Ints, list[Dropped]]:
    """Which of the samples left are kept, and which are dropped, by rules that compare the samples
    of a group."""
    drops: list[Dropped] = []

    def drop(rule: str, dropped: Bools, detail: Callable[[int], Json] | None = None) -> None:
        nonlocal left
        say = detail or (lambda at: {"reward": float(candidates.rewards[at])})
        drops.append(Dropped(rule, np.flatnonzero(dropped), say))
        left = left & ~dropped

    members = Members(candidates.groups, candidates.trajectories, candidates.rewards)
    if held.recipe.top_fraction is not None:
        drop("top_fraction", below_top(members, left, held.recipe.top_fraction))
    if (least := held.recipe.min_group) is not None:
        there = members_left(members, left)
        limit = {"min_group": least}
        drop("group_incomplete", left & (there < least), lambda at: {"members": int(there[at])} | limit)
    if "groups" not in held.algorithm.needs:
        return np.flatnonzero(left), drops
    pairs = "pairs" in held.algorithm.needs
    if held.recipe.drop_zero_variance or pairs:
        drop("zero_variance", flat(members, left, _compared(candidates, left, held)))
    if not pairs:
        return np.flatnonzero(left), drops
    kept = best_and_worst(members, left).ravel()
    unpaired = left.copy()
    unpaired[kept] = False
    drop("unpaired", unpaired)
    return kept, drops


def _compared(candidates: Candidates, left: Bools, held: RuleContext) -> Bools:
    """The samples whose rewards count when a group's rewards are compared."""
    if held.recipe.group_statistics == "kept":
        return left
    return left | (candidates.rewarded & np.isfinite(candidates.rewards))


def select(
    candidates: Sequence[C],
    recipe: RecipeConfig,
    algorithm: Algorithm,
    version: int,
    limits: ModelLimits | None = None,
    *,
    whole_groups: bool = True,
) -> tuple[list[C], list[Drop]]:
    """Candidates to train on, in order, and the dropped ones. Arguments as of `sort_out`."""
    kept, drops = sort_out(
        columns_of(candidates, recipe.deciding_share),
        recipe,
        algorithm,
        version,
        limits,
        whole_groups=whole_groups,
    )
    named = [Drop(candidates[at], rule, detail) for at, rule, detail in drops]
    return [candidates[at] for at in kept], named


def candidates_in(
    trajectory: Trajectory, recipe: RecipeConfig, check: FitCheck | None = None, policy: str | None = None
) -> list[Sample]:
    """The trajectory's candidates, leaves in turn order.

    Args:
        check: of the experts that its turns record; None: they are not checked.
        policy: in training; None: it is trained in another run, and versions mean nothing.
    """
    chosen = chooses(recipe, trajectory)
    own, others = recipe.own(policy), recipe.other_policies or ()
    samples = samples_of(
        trajectory, recipe.reward_source, recipe.paths, chosen=chosen, policy=own, others=others
    )
    candidates = [sample for sample in samples if is_candidate(sample, recipe)]
    return (
        candidates
        if check is None
        else [replace(candidate, misrouted=check.of_path(candidate)) for candidate in candidates]
    )
