"""Bounds of sampling parameters: values that no engine can compute with are refused or clamped."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


def _greedy_if_tiny(value: float) -> float:
    """Below 1e-6 logits over the temperature overflow: greedy is what such a value means."""
    return 0.0 if value < 1e-6 else value


Temperature = Annotated[Finite, Field(ge=0, le=1e4), AfterValidator(_greedy_if_tiny)]
