"""A recipe's labels and models choose a trajectory by itself as they do in SQL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.store.errors import ConfigError
from rollbook.store.events import TurnRequested
from rollbook.store.fold.trajectory import fold
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.select.conditions import chooses
from rollbook.train.select.references import find_references

LABELS: dict[str, dict[str, Any]] = {
    "none": {},
    "text": {"level": "hard", "two words": "a=b"},
    "easy": {"level": "easy"},
    "whole": {"level": 3},
    "broken": {"level": 3.5, "flag": True},
    "tiny": {"level": 1e-7},
    "null": {"level": None, "flag": False},
    "nested": {"level": {"of": [1, "é"]}},
}
RECIPES: list[tuple[dict[str, Any], set[str]]] = [
    ({"labels": ["level=hard"]}, {"text"}),
    ({"labels": ["level=hard", "two words=a=b"]}, {"text"}),
    ({"labels": ["level=3"]}, {"whole"}),
    ({"labels": ["level=3.5", "flag=true"]}, {"broken"}),
    ({"labels": ["level=1e-7"]}, {"tiny"}),
    ({"labels": ["level=null"]}, set()),
    ({"labels": ["flag=false"]}, {"null"}),
    ({"labels": ['level={"of":[1,"é"]}']}, {"nested"}),
    ({"models": ["m"]}, {"text"}),
    ({"models": ["m", "n"]}, {"text", "easy"}),
    ({"models": ["m", "n"], "labels": ["level=easy"]}, {"easy"}),
]
MODELS = {"text": ["m", "m"], "easy": ["n", "m"], "whole": ["m", None]}


def _records() -> list[Any]:
    """A trajectory of two turns for each of `LABELS`; those of `MODELS` asked for these models."""
    records = []
    for name, labels in LABELS.items():
        models = iter(MODELS.get(name, [None, None]))
        for record in fabric.records(name, [fabric.T(), fabric.T([9], [40], 0)], labels=labels):
            named = isinstance(record, TurnRequested)
            records.append(replace(record, requested_model=next(models)) if named else record)
    return records


@pytest.mark.parametrize(
    ("keys", "expected"),
    RECIPES,
    ids=lambda value: str(value) if isinstance(value, dict) else "-".join(sorted(value)),
)
def test_one_by_one_as_in_sql(tmp_path: Path, keys: dict[str, Any], expected: set[str]) -> None:
    """The same trajectories."""
    recipe, records = RecipeConfig.model_validate_json(json.dumps(keys)), _records()
    log = rb.open(tmp_path / "store", create=True)
    fabric.append(log, records)
    references = find_references(log, log.head(), fabric.RUN, recipe)
    assert {ref.trajectory_id for ref in references.refs(range(len(references))) if ref.chosen} == expected
    folded = fold(fabric.events(records)).values()
    assert {trajectory.opened.name for trajectory in folded if chooses(recipe, trajectory)} == expected


def test_a_condition_in_sql_goes_with_a_cut(tmp_path: Path) -> None:
    """What goes with the tail is named."""
    log = rb.open(tmp_path / "store", create=True)
    with pytest.raises(ConfigError, match=r"recipe.where .* on the tail recipe.labels and recipe.models"):
        fabric.train(log, fabric.config(fabric.SFT, recipe={"where": "turns > 1"}), "tail")
