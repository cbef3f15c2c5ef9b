"""Units of training at a cut: the samples that a recipe keeps, or pairs of them from recorded
preferences.

The result of a recipe on a log at a cut: the samples that it keeps, and those that each rule
drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.events import Json, PreferenceAdded
from rollbook.store.fold.history import KINDS, fold_history
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.materialize import Materializer
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import Drop, ModelLimits, mixture_in
from rollbook.train.select.references import References, find_references
from rollbook.train.select.sample_ref import SampleRef
from rollbook.train.select.samples import Sample
from rollbook.train.select.sorting import sort_out

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The samples or pairs that a recipe keeps at a cut, and its drops, by their numbers among the
    references.

    Attributes:
        units: int64 [U, 1], a sample each; or [U, 2], the chosen and the rejected sample of a
            pair.
        drops: (number, rule, detail).
        margins: float64 [U], by how much each pair's chosen sample was recorded as better, NaN
            where no margin was; None where the algorithm does not ask.
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
        samples = materializer.samples(self.units[at].ravel().tolist())
        if self.margins is None:
            return samples
        margins = np.nan_to_num(self.margins[at], nan=0.0).tolist()
        chosen = (replace(s, margin=m) for s, m in zip(samples[0::2], margins, strict=True))
        return [sample for pair in zip(chosen, samples[1::2], strict=True) for sample in pair]

    def named(self, references: References) -> list[Drop]:
        """The drops, with references to their samples instead of numbers."""
        drops = list(self.drops)
        refs = references.refs([number for number, _, _ in drops])
        return [Drop(ref, rule, detail) for ref, (_, rule, detail) in zip(refs, drops, strict=True)]


def sort_units(
    references: References,
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
    numbers, candidates = references.candidates()
    kept, drops = sort_out(candidates, recipe, algorithm, version, limits)
    drops = drops.called(numbers)
    if "pairs" not in algorithm.needs:
        return Units(numbers[kept][:, None], drops)
    if "groups" in algorithm.needs:
        return Units(numbers[kept].reshape(-1, 2), drops)
    ids = references.trajectories["trajectory_id"].to_pylist()
    of_each = {ids[references.trajectory[number]]: int(number) for number in numbers[kept]}
    pairing = paired(_preferences(log, cut, recipe.runs(run), recipe), of_each)
    concerned = [drop for drop in drops if ids[references.trajectory[drop[0]]] in pairing.named]
    broken: list[tuple[int, str, Json]] = [(int(number), "pair_broken", {}) for number in pairing.alone]
    return Units(pairing.pairs, concerned + broken, pairing.margins if "margins" in algorithm.needs else None)


def _preferences(log: Store, cut: Cut, runs: Collection[str], recipe: RecipeConfig) -> list[PreferenceAdded]:
    """The preferences of these runs that the recipe takes, lane by lane, each in order."""
    return [
        event.record
        for event in log.events_of({PreferenceAdded.KIND}, cut)
        if event.run in runs
        and isinstance(event.record, PreferenceAdded)
        and recipe.takes_preference(event.record.source)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """The outcome of pairing by preferences.

    Attributes:
        pairs: int64 [P, 2], numbers of the chosen and the rejected sample; in the order of first
            record.
        margins: float64 [P], as first recorded; NaN where none was.
        alone: kept samples of preferences whose other side is not kept, in ascending order.
        named: ids of all trajectories that preferences name.
    """

    pairs: Ints
    margins: npt.NDArray[np.float64]
    alone: Ints
    named: frozenset[str]


def paired(preferences: Iterable[PreferenceAdded], kept: Mapping[str, int]) -> Paired:
    """Pairs of samples whose two sides are kept. A preference that was recorded twice counts once.

    Args:
        kept: trajectory -> number of its only sample.
    """
    pairs: dict[tuple[int, int], float | None] = {}
    named, alone = set[str](), set[int]()
    for preference in preferences:
        ids = (preference.trajectory_id, preference.rejected_trajectory_id)
        named.update(ids)
        sides = [kept[i] for i in ids if i in kept]
        if len(sides) == 2:
            pairs.setdefault((sides[0], sides[1]), preference.margin)
        else:
            alone.update(sides)
    alone -= {side for pair in pairs for side in pair}
    return Paired(
        np.array(list(pairs), np.int64).reshape(-1, 2),
        np.array([np.nan if margin is None else margin for margin in pairs.values()], np.float64),
        np.array(sorted(alone), np.int64),
        frozenset(named),
    )


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
