"""A recipe's conditions on trajectories (labels, models, and its own), as SQL and for a single
trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.store.events import Json
from rollbook.store.fold.trajectory import Trajectory
from rollbook.train.config.recipe import RecipeConfig


@dataclass(frozen=True, slots=True)
class Conditions:
    """A recipe's conditions on trajectories.

    Attributes:
        sql: a query for the ids of the trajectories that meet them; parameters: of the query.
        condition: the recipe's own condition, for an error message.
    """

    sql: str
    parameters: Json
    condition: str


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


def chooses(recipe: RecipeConfig, trajectory: Trajectory) -> bool:
    """Whether a trajectory meets a recipe's conditions on labels and models, as in SQL; `where` is
    not checked."""
    labels = {name: _text(value) for name, value in trajectory.opened.labels.items()}
    wanted = (label.partition("=") for label in recipe.labels)
    if any(labels.get(name) != value for name, _, value in wanted):
        return False
    models = (turn.requested.requested_model for turn in trajectory.turns.values())
    return not recipe.models or all(model in recipe.models for model in models)


def _text(value: Any) -> str | None:
    """A value as text, as DuckDB's `json_extract_string` does: a string as it is, null as None,
    anything else as JSON."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()
