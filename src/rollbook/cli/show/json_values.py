"""Converts frozen values to plain JSON values. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def plain(value: Any, *, without: Collection[str] = ()) -> Any:
    """Dataclasses as objects, arrays as lists, and numbers that JSON does not have as words, such as `NaN`.

    Args:
        without: fields of the outermost dataclass to leave out.
    """
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name not in without}
    if isinstance(value, np.ndarray):
        return plain(value.tolist()) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
