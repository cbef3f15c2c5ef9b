"""What enters by HTTP as a number is one: no text that looks like one, and no true or false."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rollbook.ingest.fields import FinishTrajectory, validated
from rollbook.store.errors import RequestError

MODULES = ("ingest.fields", "rollouts.agents.service", "engines.embedded.engine")
"""Where the bodies of routes, and of answers, are modelled."""
NO_NUMBERS = ("1", "1.0", True, False, "true")


def _models() -> list[type[BaseModel]]:
    modules = [importlib.import_module(f"rollbook.{name}") for name in MODULES]
    models = [
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, BaseModel) and kind.__module__ == module.__name__
    ]
    assert len(models) > 15
    return models


def _has(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_has(part, kind) for part in get_args(annotation))


def _numbers() -> list[Any]:
    """Each field that is a number, or holds some."""
    params = []
    for model in _models():
        for name, field in model.model_fields.items():
            is_number = _has(field.annotation, int) or _has(field.annotation, float)
            if is_number and not _has(field.annotation, str):
                params.append(pytest.param(field, id=f"{model.__name__}.{name}"))
    return params


@pytest.mark.parametrize("field", _numbers())
def test_a_field_of_numbers_takes_nothing_else(field: FieldInfo) -> None:
    """Alone, in a list and by a name."""
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
    for value in NO_NUMBERS:
        for wrong in (value, [value], {"a": value}):
            with pytest.raises(ValidationError):
                adapter.validate_python(wrong)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"reward": "1.0"}, "reward: must be a number"),
        ({"reward": True}, "reward: must be a number"),
        ({"turn_rewards": [1, "2"]}, "turn_rewards.1: must be a number"),
        ({"turn_rewards": {"r-1": True}}, "turn_rewards.r-1: must be a number"),
    ],
)
def test_a_reward_that_is_none_is_a_400(body: dict[str, Any], reason: str) -> None:
    """Which names the field, and no type's inner name."""
    with pytest.raises(RequestError) as caught:
        validated(FinishTrajectory, body)
    assert (caught.value.status, str(caught.value)) == (400, reason)


def test_numbers_are_taken() -> None:
    """Whole ones for others, too."""
    finish = validated(FinishTrajectory, {"reward": 1, "turn_rewards": [0, -1.5]})
    assert (finish.reward, finish.turn_rewards) == (1.0, [0.0, -1.5])
