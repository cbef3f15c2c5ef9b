"""A user's own functions and algorithms, which a CONFIG names as `module:name`.

They are imported when a CONFIG is read, or when a replay is told to trust what a manifest names: a log by
itself runs no code. The digest of their source is recorded. What a function gives is checked against the
shape that was asked of it, since another shape would silently be spread over the batch.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from rollbook.store.errors import ConfigError, RollbookError, TrainError
from rollbook.store.events import Json
from rollbook.store.load_object import load_object
from rollbook.train.algorithms.algorithm import NEEDS
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PART_KEYS = ("baseline", "surrogate", "correction", "kl_estimator", "normalizer")
KEYS = ("name", *PART_KEYS)
"""Keys of an algorithm that may name a part of one's own; the first is the algorithm itself."""

OwnPart = Annotated[str, Field(pattern=f"^{NAMED.pattern}$")]
"""`module:name` of a part that is not Rollbook's."""

_T = TypeVar("_T")
_loaded: dict[str, Any] = {}
"""Name -> part, of those that were loaded in this process."""


def named_parts(algorithm: Json) -> list[str]:
    """The parts of one's own that an algorithm's keys name."""
    values = (algorithm.get(key) for key in KEYS)
    return [value for value in values if isinstance(value, str) and NAMED.fullmatch(value)]


def declared_needs(algorithm: Json) -> dict[tuple[str, str], frozenset[str]]:
    """(Key, name) of each part of one's own, without the algorithm itself -> what it declares to need.

    A part declares it by an attribute `needs`: names as `algorithm.Need` has them. Without one it needs what
    every part of its kind is given.

    Raises:
        TrainError: a part was not loaded.
        ValueError: its `needs` are no names.
    """
    return {
        (key, name): _declared(key, name)
        for key in PART_KEYS
        if isinstance(name := algorithm.get(key), str) and NAMED.fullmatch(name)
    }


def check_declared(declared: Mapping[tuple[str, str], frozenset[str]], remedies: Mapping[str, str]) -> None:
    """Check that parts can be given what they declare to need.

    Args:
        remedies: need -> what to set so that it is met; "" where it is met.

    Raises:
        ValueError: it names the part, its need, and what to set.
    """
    for (key, name), needs in declared.items():
        for need in sorted(needs):
            if need not in NEEDS:
                raise ValueError(
                    f"{key} {name!r} needs {need!r}, which nothing gives: choose of {', '.join(NEEDS)}"
                )
            if remedies.get(need):
                raise ValueError(f"{key} {name!r} needs {need!r}: {remedies[need]}")


def _declared(key: str, name: str) -> frozenset[str]:
    needs = getattr(loaded(name), "needs", ())
    if isinstance(needs, str) or not all(isinstance(need, str) for need in needs):
        raise ValueError(f"{key} {name!r}: its `needs` are {needs!r}; write a set of names")
    return frozenset(needs)


def load_part(name: str) -> Any:
    """Import a part, from what is installed or lies in the current folder.

    Raises:
        TrainError: there is none of that name, or it cannot be imported.
    """
    if name not in _loaded:
        here = str(Path.cwd())
        if here not in sys.path:  # a command has only its own folder there; what is installed comes first
            sys.path.append(here)
        try:
            _loaded[name] = load_object(name, f"part {name!r} cannot be loaded")
        except ConfigError as error:
            raise TrainError(str(error)) from error
    return _loaded[name]


def part(table: Mapping[str, _T], name: str) -> _T:
    """The part of a name: one of a table, or one that was loaded.

    Raises:
        TrainError: it is another's, and was not loaded.
    """
    return table[name] if name in table else loaded(name)


def loaded(name: str) -> Any:
    """A part that was loaded before.

    Raises:
        TrainError: it was not.
    """
    if name not in _loaded:
        raise TrainError(
            f"the log names code of its own, {name!r}: it is imported and run only where you say so "
            "(--trust-parts)"
        )
    return _loaded[name]


def sources(algorithm: Json) -> dict[str, str]:
    """Part -> sha256 of the file that it is defined in; of loaded ones."""
    found = {}
    for name in named_parts(algorithm):
        file = inspect.getsourcefile(loaded(name))
        found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "no source"
    return found


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
