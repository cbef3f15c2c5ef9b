"""Units of training, at a cut: the samples that a recipe keeps, or pairs of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Json, PreferenceAdded
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.data.materialize import Materializer
from rollbook.train.data.pairs import paired
from rollbook.train.data.recipe import Drop, ModelLimits
from rollbook.train.data.references import References
from rollbook.train.data.samples import Sample
from rollbook.train.data.sorting import sort_out

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What a recipe makes of the samples of a cut, by their numbers among the references.

    Attributes:
        units: int64 [U, 1], a sample each; or [U, 2], the chosen and the rejected sample of a pair.
        drops: (number, rule, detail).
        margins: float64 [U], by how much each pair's chosen sample was recorded as better, NaN where that was
            not said; None where the algorithm does not ask.
    """

    units: Ints
    drops: Iterable[tuple[int, str, Json]]
    margins: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.units)

    def samples(self, at: Ints, materializer: Materializer) -> list[Sample]:
        """The samples of some units, one after the other.

        Raises:
            CorruptionError, TrainError: as `Materializer.samples`.
        """
        found = materializer.samples(self.units[at].ravel().tolist())
        if self.margins is None:
            return found
        margins = np.nan_to_num(self.margins[at], nan=0.0).tolist()
        chosen = (replace(s, margin=m) for s, m in zip(found[0::2], margins, strict=True))
        return [sample for pair in zip(chosen, found[1::2], strict=True) for sample in pair]

    def named(self, found: References) -> list[Drop]:
        """The drops, by name."""
        drops = list(self.drops)
        refs = found.refs([number for number, _, _ in drops])
        return [Drop(ref, rule, detail) for ref, (_, rule, detail) in zip(refs, drops, strict=True)]


def sort_units(
    found: References,
    log: Store,
    cut: Cut,
    run: str,
    recipe: RecipeConfig,
    algorithm: Algorithm,
    version: int,
    limits: ModelLimits | None = None,
) -> Units:
    """The units that the recipe keeps for an algorithm, in order of their samples' names or of preferences.

    Args:
        version: the trainer's input policy version.
        limits: of the model; None where they are not known, and so not held against anything.

    Raises:
        CorruptionError: a file is damaged.
    """
    numbers, candidates = found.candidates()
    kept, drops = sort_out(candidates, recipe, algorithm, version, limits)
    drops = drops.called(numbers)
    if "pairs" not in algorithm.needs:
        return Units(numbers[kept][:, None], drops)
    if "groups" in algorithm.needs:
        return Units(numbers[kept].reshape(-1, 2), drops)
    ids = found.trajectories["trajectory_id"].to_pylist()
    of_each = {ids[found.trajectory[number]]: int(number) for number in numbers[kept]}
    made = paired(_preferences(log, cut, recipe.runs(run), recipe), of_each)
    concerned = [drop for drop in drops if ids[found.trajectory[drop[0]]] in made.named]
    broken: list[tuple[int, str, Json]] = [(int(number), "pair_broken", {}) for number in made.alone]
    return Units(made.pairs, concerned + broken, made.margins if "margins" in algorithm.needs else None)


def _preferences(log: Store, cut: Cut, runs: Collection[str], recipe: RecipeConfig) -> list[PreferenceAdded]:
    """The preferences of these runs that the recipe takes, lane by lane, each in order."""
    return [
        event.record
        for event in log.events_of({PreferenceAdded.KIND}, cut)
        if event.run in runs
        and isinstance(event.record, PreferenceAdded)
        and recipe.takes_preference(event.record.source)
    ]
