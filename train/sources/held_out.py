"""What is held out of a training: the samples, and the rewards of trajectories, of split `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollbook.store import Store, format_cut
from rollbook.store.cut import Cut
from rollbook.store.errors import TrainError
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.materialize import Materializer
from rollbook.train.batches.units import sort_units
from rollbook.train.config.config import TrainConfig
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.recipe import ModelLimits
from rollbook.train.select.references import find_references
from rollbook.train.select.samples import Sample

SPLIT = "eval"


def learns_from_samples(algorithm: Algorithm) -> bool:
    """Whether the algorithm's loss is meaningful on samples that others sampled, as sft's and dpo's
    are."""
    return not algorithm.needs & {"logprobs", "old", "values"}


class HeldOutSamples:
    """The samples of split `eval` at a cut that the training's recipe would keep, or pairs of them.

    Staleness is ignored: how a sample was made decides nothing here.

    Args:
        limits: of the model.

    Raises:
        TrainError: there is none.
        CorruptionError: a file is damaged.
        ConfigError: a condition of the recipe is not SQL.
    """

    def __init__(self, config: TrainConfig, log: Store, cut: Cut, limits: ModelLimits) -> None:
        assert config.evaluation is not None
        recipe = _eval_recipe(config)
        references = find_references(log, cut, config.run, recipe)
        units = sort_units(references, log, cut, config.run, recipe, config.algorithm, 0, limits)
        if not len(units):
            runs = ", ".join(recipe.runs(config.run))
            raise TrainError(
                f"[evaluation]: the recipe keeps no sample of split {SPLIT!r} in run {runs} at "
                f"{format_cut(cut) or 'the beginning of the log'}: record some, name their run by "
                "evaluation.source_runs, or leave the table out"
            )
        self._units = replace(units, drops=())  # nobody asks for them
        chosen = np.random.default_rng([config.seed, len(units)]).permutation(len(units))
        self._chosen = np.sort(chosen[: config.evaluation.max_samples])
        self._samples = Materializer(log, cut, references, config.run)
        # Samples in a forward pass: as many as in training.
        demand, pairs = config.algorithm.demand, "pairs" in config.algorithm.needs
        self._size = config.micro_batch_size or demand.groups * (2 if pairs else demand.group_size)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._chosen) * self._units.units.shape[1]

    def micro_batches(self) -> Iterator[list[Sample]]:
        """The samples, one forward pass after the other, always the same; pairs are not split."""
        step = self._size // self._units.units.shape[1]
        for start in range(0, len(self._chosen), step):
            yield self._units.samples(self._chosen[start : start + step], self._samples)


def _eval_recipe(config: TrainConfig) -> RecipeConfig:
    """The recipe for held-out samples."""
    assert config.evaluation is not None
    runs = config.evaluation.source_runs or config.recipe.source_runs
    return config.recipe.model_copy(
        update={
            "splits": (SPLIT,),
            "source_runs": runs,
            "max_staleness": None,
            "other_policies": None,
            "refill": False,
            "too_long": "drop",
        }
    )


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """The reward of a finished trajectory of split `eval`, and the versions that sampled it."""

    reward: float
    success: bool | None
    oldest_version: int
    newest_version: int


def held_out_rewards(
    log: Store, cut: Cut, run: str, policy: str, source: str, version: int
) -> dict[str, HeldOutReward]:
    """Trajectory -> its reward, for the trajectories of split `eval` that finished with one.

    Args:
        source: of the rewards.
        version: trajectories without a token of this or a newer version of the policy do not
            count.

    Raises:
        CorruptionError: a file is damaged.
    """
    params = {"run": run, "split": SPLIT, "source": source, "policy": policy, "version": version}
    with connect_at(log, format_cut(cut)) as connection:
        rows = connection.read(_REWARDS, params).fetchall()
    return {trajectory_id: HeldOutReward(*row) for trajectory_id, *row in rows}


_REWARDS = """
    SELECT o.trajectory_id, arg_max(r.reward, (r.lane, r.seq)), any_value(o.success),
           any_value(t.min_version), any_value(t.max_version)
    FROM internal.trajectory_scalars o JOIN rewards r USING (trajectory_id)
    JOIN (SELECT trajectory_id, min(min_version) AS min_version, max(max_version) AS max_version
          FROM internal.turn_scalars WHERE policy = $policy GROUP BY trajectory_id) t USING (trajectory_id)
    WHERE o.run = $run AND o.split = $split AND o.finished IS NOT NULL AND t.max_version >= $version
      AND r.turn_id IS NULL AND NOT r.superseded AND r.source = $source
    GROUP BY o.trajectory_id"""
