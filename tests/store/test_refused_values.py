"""What is said of values that a model refuses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rollbook.store.config import describe_invalid, first_invalid_value, invalid_values


def _small(value: float) -> float:
    if value > 9:
        raise ValueError("it is more than 9")
    return value


Small = Annotated[float, AfterValidator(_small)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Circle(_Strict):
    name: Literal["circle"]
    radius: Small


class _Square(_Strict):
    name: Literal["square", "oblong"]
    side: Small


class _Whole(_Strict):
    shape: Annotated[_Circle | _Square, Field(discriminator="name")] | None = None
    marks: list[Small] | dict[str, Small] | None = None
    inner: tuple[_Square, ...] = ()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"marks": [1.0, True]}, "marks.1: Input should be a valid number (got True)"),
        ({"marks": {"a": "1"}}, "marks.a: Input should be a valid number (got '1')"),
        ({"marks": "x"}, "marks: Input should be a valid array or an object (got 'x')"),
        ({"marks": [10.0]}, "marks.0: it is more than 9 (got 10.0)"),
        (
            {"shape": {"name": "circle", "radius": "1"}},
            "shape.radius: Input should be a valid number (got '1')",
        ),
        ({"shape": {"name": "circle"}}, "shape.radius: is missing"),
        ({"shape": {"name": "cricle"}}, "shape.name: there is no 'cricle': did you mean circle?"),
        ({"shape": {"name": "disk"}}, "shape.name: there is no 'disk': choose of circle, square, oblong"),
        ({"shape": {"radius": 1}}, "shape.name: is missing"),
        (
            {"shaep": 1, "marsk": 2},
            "shaep: unknown key: did you mean shape?; marsk: unknown key: did you mean marks?",
        ),
        (
            {"inner": [{"name": "square", "side": 1.0, "sied": 1}]},
            "inner.0.sied: unknown key: did you mean side?",
        ),
        ({"q": 1}, "q: unknown key: there are shape, marks, inner"),
        (
            {"inner": [{"name": "squares", "side": 1.0}]},
            "inner.0.name: Input should be 'square' or 'oblong' (got 'squares': did you mean square?)",
        ),
    ],
    ids=str,
)
def test_the_key_is_whole_and_the_users_own(values: Any, reason: str) -> None:
    """No inner part of a model is in it, and of a union's branches the one that was meant is told."""
    with pytest.raises(ValidationError) as caught:
        _Whole.model_validate_json(json.dumps(values))
    assert (
        "; ".join(
            f"{invalid.key}: {describe_invalid(_Whole, invalid)}"
            for invalid in invalid_values(caught.value, values)
        )
        == reason
    )


def test_one_line_holds_no_value() -> None:
    """What a client is answered does not send its values back."""
    with pytest.raises(ValidationError) as caught:
        _Whole.model_validate({"marks": ["secret"], "other": 1})
    assert (
        first_invalid_value(caught.value, {"marks": ["secret"], "other": 1})
        == "marks.0: Input should be a valid number"
    )
