"""What a recipe makes of a log at a cut: the samples that it keeps, and those that each rule drops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.config import RecipeConfig
from rollbook.train.data.recipe import Drop, sort_out
from rollbook.train.data.references import SampleRef, find_references


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The samples of a run at a cut, sorted out: kept ones in the order of their names, and drops.

    Attributes:
        version: of the policy, by which staleness was decided.
    """

    kept: list[SampleRef]
    drops: list[Drop]
    version: int

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
) -> Applied:
    """Apply a recipe to all samples of a run's finished trajectories, used or not.

    Args:
        version: the policy's; absent: its newest at the cut.

    Raises:
        CorruptionError: a file is damaged.
        ConfigError: a condition of the recipe is not SQL.
    """
    if version is None:
        version = fold_history(log.events_of(KINDS, cut), run, policy).version
    found = find_references(log, cut, run, recipe)
    numbers, candidates = found.candidates()
    kept, drops = sort_out(candidates, recipe, algorithm, version)
    refs = found.refs(numbers)
    return Applied(
        [refs[at] for at in kept], [Drop(refs[at], rule, detail) for at, rule, detail in drops], version
    )
