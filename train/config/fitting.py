"""Checks whether a recipe has a meaning for an algorithm. Pure."""

from __future__ import annotations

from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.recipe import RecipeConfig


def check_recipe(recipe: RecipeConfig, algorithm: Algorithm) -> None:
    """Check that an algorithm has what the keys of a recipe speak of.

    Raises:
        ValueError: it has not.
    """
    name, needs = algorithm.algorithm_name, algorithm.needs
    if recipe.age_decay < 1 and "logprobs" not in needs:
        raise ValueError(
            f"recipe.age_decay weighs the tokens of policy gradients: {name} has no versions to go by"
        )
    if algorithm.head_width and recipe.max_staleness is not None:
        raise ValueError(
            "recipe.max_staleness counts versions of the policy in training, and no token is sampled by "
            "a reward model: leave it out"
        )
    if recipe.order == "recorded" and not algorithm.cycles:
        raise ValueError(
            f'recipe.order = "recorded" is about samples that are gone over again and again, and {name} uses '
            "each once: leave it out, and see admission.order"
        )
    if recipe.min_group is not None and not algorithm.cycles:
        _check_min_group(recipe.min_group, algorithm)
    if recipe.group_statistics == "all" and ("groups" not in needs or "pairs" in needs):
        raise ValueError(
            f'recipe.group_statistics = "all" is about the baselines of groups, and {name} has none here: '
            "leave it out, or compare groups (algorithm.group_size)"
        )


def _check_min_group(least: int, algorithm: Algorithm) -> None:
    """Check that a group of which a step is made can have so many members.

    Raises:
        ValueError: it cannot.
    """
    size = algorithm.demand.group_size
    if "groups" not in algorithm.needs:
        raise ValueError(
            f"recipe.min_group counts the members of a group, and {algorithm.algorithm_name} takes samples "
            "one by one here: leave it out, or compare groups (algorithm.group_size)"
        )
    if least > size:
        raise ValueError(
            f"recipe.min_group {least} is more than a group has (algorithm.group_size {size}): every one "
            "would be dropped"
        )
