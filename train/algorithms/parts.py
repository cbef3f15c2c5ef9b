"""A user's own functions and algorithms, which a CONFIG names as `module:name`.

They are imported when a CONFIG is read, or when a replay is told to trust the names in a
manifest: a log by itself runs no code. The digest of their source is recorded. What a function
returns is checked for its shape, since a wrong one would silently be broadcast over the batch.
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
    """The user's own parts that an algorithm's keys name."""
    values = (algorithm.get(key) for key in KEYS)
    return [value for value in values if isinstance(value, str) and NAMED.fullmatch(value)]


def declared_needs(algorithm: Json) -> dict[tuple[str, str], frozenset[str]]:
    """(Key, name) of each of the user's own parts, without the algorithm itself -> what it declares
    to need.

    A part declares this in an attribute `needs`, with names as in `algorithm.Need`. Without the
    attribute it needs what every part of its kind is given.

    Raises:
        TrainError: a part was not loaded.
        ValueError: its `needs` are not such names.
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
    needs = getattr(loaded_part(name), "needs", ())
    if isinstance(needs, str) or not all(isinstance(need, str) for need in needs):
        raise ValueError(f"{key} {name!r}: its `needs` are {needs!r}; write a set of names")
    return frozenset(needs)


def load_part(name: str) -> Any:
    """Import a part from an installed package or the current folder.

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
    """The part with a name: one in the table, or one that was loaded.

    Raises:
        TrainError: it is not in the table, and was not loaded.
    """
    return table[name] if name in table else loaded_part(name)


def loaded_part(name: str) -> Any:
    """A part that was loaded before.

    Raises:
        TrainError: it was not loaded.
    """
    if name not in _loaded:
        raise TrainError(
            f"the log names code of its own, {name!r}: it is imported and run only where you say so "
            "(--trust-parts)"
        )
    return _loaded[name]


def sources(algorithm: Json) -> dict[str, str]:
    """Part -> sha256 of the file that defines it, for the loaded parts."""
    digests = {}
    for name in named_parts(algorithm):
        file = inspect.getsourcefile(loaded_part(name))
        digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "no source"
    return digests


def call_part(key: str, name: str, function: Callable[..., _T], expected: tuple[int, ...], *args: Any) -> _T:
    """Call the part that a key names, and check that its result has the expected shape.

    Raises:
        TrainError: the result is something else; or a part of the user's own raised an error.
    """
    what = f"{key} {name!r}"
    try:
        result = function(*args)
    except RollbookError:
        raise
    except Exception as error:
        if not NAMED.fullmatch(name):
            raise
        raise TrainError(f"{what} failed: {error!r}") from error
    return check_shape(what, result, expected)


def check_shape(what: str, values: _T, expected: tuple[int, ...]) -> _T:
    """The values, if they have the expected shape.

    Raises:
        TrainError: they have not; it names what returned them.
    """
    shape = getattr(values, "shape", None)
    if shape is None or tuple(shape) != expected:
        gave = f"a {type(values).__name__}" if shape is None else f"shape {list(shape)}"
        raise TrainError(f"{what} gave {gave} where shape {list(expected)} was asked")
    return values


def check_advantages(what: str, advantages: Any, rollouts: Rollouts) -> Advantages:
    """The advantages of a rollout batch, checked to be one per sample or one per trained token.

    Raises:
        TrainError: they are neither.
    """
    if not isinstance(advantages, Advantages):
        raise TrainError(f"{what} gave a {type(advantages).__name__} where `Advantages` were asked")
    tokens = int(np.sum(rollouts.lengths))
    check_shape(
        f"{what}: advantages", advantages.values, (tokens if advantages.per_token else len(rollouts.lengths),)
    )
    if advantages.returns is not None:
        check_shape(f"{what}: returns", advantages.returns, (tokens,))
    return advantages
