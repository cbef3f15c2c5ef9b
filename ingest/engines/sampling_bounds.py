"""Numbers that enter by HTTP, and bounds of sampling parameters.

What is no number is refused; what no engine can compute with is refused or clamped.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _number(value: object) -> object:
    """A text such as "1.0" is no number, and neither is true, which Python would take for 1."""
    if isinstance(value, bool | str | bytes):
        raise ValueError("must be a number")
    return value


Finite = Annotated[float, AfterValidator(_finite), BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]
"""An integer, as JSON has it: 5, or 5.0."""


def _greedy_if_tiny(value: float) -> float:
    """Below 1e-6 logits over the temperature overflow: greedy is what such a value means."""
    return 0.0 if value < 1e-6 else value


Temperature = Annotated[Finite, Field(ge=0, le=1e4), AfterValidator(_greedy_if_tiny)]
