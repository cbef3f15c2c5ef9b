"""Base of the tables of a CONFIG file: typed and strict; the docstring under a key describes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Table(BaseModel):
    """Unknown and ill-typed keys are errors, numbers must be finite, and values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
