"""What all tables of a CONFIG have in common.

The docstring under a key is what the page of keys says of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import shown
from rollbook.store.refused_values import refused, told

T = TypeVar("T", bound=BaseModel)

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(gt=0)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class Table(BaseModel):
    """A table of a CONFIG: unknown keys are errors, and types are strict."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def typed(
    model: type[T],
    values: Json,
    name: str,
    whole: str = "table",
    written: Callable[[str], str] = str,
    within: str = "",
) -> T:
    """A table's values, typed.

    Args:
        name: what the table or its file is called in an error; whole: what is wrong with no key of it alone;
            written: a key as the file has it; within: the table's own name in the file.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed; all are named.
    """
    try:
        # JSON mode: TOML's lists serve as tuples and its integers as floats, yet types stay strict.
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        found = refused(error, values)
        places = [".".join([within] * bool(within) + list(one.keys)) for one in found]
        lines = [
            f"  {written(place) if place else whole}: {shown(told(model, one))}"
            for place, one in zip(places, found, strict=True)
        ]
        raise ConfigError(f"{name}:\n" + "\n".join(lines)) from error
