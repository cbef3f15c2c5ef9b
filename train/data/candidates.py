"""The candidates of one folded trajectory: its samples that a recipe speaks of. Pure."""

from __future__ import annotations

from dataclasses import replace

from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.data.conditions import chooses
from rollbook.train.data.recipe import is_candidate
from rollbook.train.data.routing import FitCheck
from rollbook.train.data.samples import Sample, samples_of


def candidates_in(
    trajectory: Trajectory, recipe: RecipeConfig, check: FitCheck | None = None, policy: str | None = None
) -> list[Sample]:
    """The trajectory's candidates, leaves in turn order.

    Args:
        check: of the experts that its turns record; None: nobody asks.
        policy: in training; None: it is trained in another run, and versions say nothing.
    """
    chosen = chooses(recipe, trajectory)
    own, others = recipe.own(policy), recipe.other_policies or ()
    samples = samples_of(
        trajectory, recipe.reward_source, recipe.paths, chosen=chosen, policy=own, others=others
    )
    found = [sample for sample in samples if is_candidate(sample, recipe)]
    return found if check is None else [replace(one, misrouted=check.of_path(one)) for one in found]
