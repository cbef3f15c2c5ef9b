"""A recipe's conditions on trajectories that are SQL: labels, models, and its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollbook.store.events import Json
from rollbook.train.config.recipe import RecipeConfig


@dataclass(frozen=True, slots=True)
class Conditions:
    """A recipe's conditions on trajectories.

    Attributes:
        sql: a query for the ids of those for which they hold; parameters: of the query.
        said: the recipe's own condition, for an error message.
    """

    sql: str
    parameters: Json
    said: str


def conditions_of(recipe: RecipeConfig) -> Conditions | None:
    """The conditions of a recipe that are SQL; None where it has none."""
    if not recipe.asks_sql:
        return None
    held, parameters = list[str](), dict[str, Any]()
    for i, (name, _, value) in enumerate(label.partition("=") for label in recipe.labels):
        held.append(f"json_extract_string(labels, $label{i}) = $value{i}")
        parameters |= {f"label{i}": f'$."{name}"', f"value{i}": value}
    if recipe.models:
        held.append("""trajectory_id NOT IN (
            SELECT trajectory_id FROM turns WHERE requested_model IS NULL
            OR NOT list_contains($models, requested_model))""")
        parameters["models"] = list(recipe.models)
    if recipe.where is not None:
        held.append(f"({recipe.where}\n)")
    return Conditions(
        f"SELECT trajectory_id FROM trajectories WHERE {' AND '.join(held)}", parameters, recipe.where or ""
    )
