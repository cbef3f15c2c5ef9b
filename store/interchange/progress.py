"""How far a long export or import is, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""From what is being done, and of how many units: a context with a function that counts units done."""


def untold(what: str, total: int) -> AbstractContextManager[Callable[[int], Any]]:
    """Progress that is not shown."""
    return nullcontext(lambda count: None)
