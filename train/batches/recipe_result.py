"""The result of a recipe on a log at a cut: the samples that it keeps, and those that each rule
drops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.units import sort_units
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import Drop, ModelLimits, mixture_in
from rollbook.train.select.references import find_references
from rollbook.train.select.sample_ref import SampleRef


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The samples of a run at a cut, sorted out: kept ones in the order of their names, and drops.

    Attributes:
        version: of the policy, by which staleness was decided.
        pairs: the chosen and the rejected sample of each pair; None where the algorithm takes samples.
    """

    kept: list[SampleRef]
    drops: list[Drop]
    version: int
    pairs: list[tuple[SampleRef, SampleRef]] | None = None

    @property
    def rules(self) -> Counter[str]:
        """Rule -> how many samples it dropped."""
        return Counter(drop.rule for drop in self.drops)


def apply_recipe(
    log: Store,
    cut: Cut,
    run: str,
    policy: str,
    recipe: RecipeConfig,
    algorithm: Algorithm,
    version: int | None = None,
    limits: ModelLimits | None = None,
) -> Applied:
    """Apply a recipe to all samples of a run's finished trajectories, used or not.

    Args:
        version: the policy's; absent: its newest at the cut.
        limits: of the model; None where they are not known, and so not checked.

    Raises:
        CorruptionError: a file is damaged.
        ConfigError: a condition of the recipe is not SQL.
    """
    if version is None:
        version = fold_history(log.events_of(KINDS, cut), run, policy).version
    references = find_references(log, cut, run, recipe, mixture=mixture_in(limits), policy=policy)
    sorted_out = sort_units(references, log, cut, run, recipe, algorithm, version, limits)
    kept = np.unique(sorted_out.units)
    refs = dict(zip(kept.tolist(), references.refs(kept), strict=True))
    pairs = None
    if "pairs" in algorithm.needs:
        pairs = [(refs[chosen], refs[rejected]) for chosen, rejected in sorted_out.units.tolist()]
    return Applied(
        list(refs.values()),
        sorted_out.named(references),
        version,
        pairs,
    )
