"""What a part gives is held against what was asked of it. Pure.

A part of one's own that gives another shape would otherwise be spread over the batch without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rollbook.store.errors import RollbookError, TrainError
from rollbook.train.algorithms.parts import NAMED
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

_T = TypeVar("_T")


def called(key: str, name: str, function: Callable[..., _T], asked: tuple[int, ...], *given: Any) -> _T:
    """What the part that a key names gives, of the shape that was asked.

    Raises:
        TrainError: it gave something else; or, of one's own, it raised an error.
    """
    what = f"{key} {name!r}"
    try:
        found = function(*given)
    except RollbookError:
        raise
    except Exception as error:
        if not NAMED.fullmatch(name):
            raise
        raise TrainError(f"{what} failed: {error!r}") from error
    return shaped(what, found, asked)


def shaped(what: str, found: _T, asked: tuple[int, ...]) -> _T:
    """The numbers that were found, if they are of the shape that was asked.

    Raises:
        TrainError: they are not; it names what gave them.
    """
    shape = getattr(found, "shape", None)
    if shape is None or tuple(shape) != asked:
        gave = f"a {type(found).__name__}" if shape is None else f"shape {list(shape)}"
        raise TrainError(f"{what} gave {gave} where shape {list(asked)} was asked")
    return found


def held_advantages(what: str, found: Any, of: Rollouts) -> Advantages:
    """The advantages of a rollout batch, if there is one for each sample, or for each trained token.

    Raises:
        TrainError: there is not.
    """
    if not isinstance(found, Advantages):
        raise TrainError(f"{what} gave a {type(found).__name__} where `Advantages` were asked")
    tokens = int(np.sum(of.lengths))
    shaped(f"{what}: advantages", found.values, (tokens if found.per_token else len(of.lengths),))
    if found.returns is not None:
        shaped(f"{what}: returns", found.returns, (tokens,))
    return found
