"""The registry of algorithms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializeAsAny, ValidationError, WrapValidator

from rollbook.store.errors import TrainError
from rollbook.store.events import Json
from rollbook.store.refused_values import refused
from rollbook.train.algorithms.algorithm import NEEDS, Algorithm
from rollbook.train.algorithms.combinations import (
    Cispo,
    Dapo,
    DecoupledPpo,
    DrGrpo,
    Gspo,
    PolicyGradient,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
)
from rollbook.train.algorithms.grpo import Grpo
from rollbook.train.algorithms.parts import NAMED, load_part, loaded, named_parts
from rollbook.train.algorithms.ppo import Ppo
from rollbook.train.algorithms.preferences import Dpo
from rollbook.train.algorithms.reward_models import RewardModel
from rollbook.train.algorithms.sft import Sft

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "sft": Sft,
    "grpo": Grpo,
    "policy_gradient": PolicyGradient,
    "rloo": Rloo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "decoupled_ppo": DecoupledPpo,
    "ppo": Ppo,
    "dpo": Dpo,
    "reward_model": RewardModel,
}
"""Name -> algorithm, in the order in which pages show them."""

if TYPE_CHECKING:
    AnyAlgorithm = Algorithm
else:
    AnyAlgorithm = Annotated[
        reduce(or_, ALGORITHMS.values()),
        Field(discriminator="name"),
        WrapValidator(lambda value, handler: _own_or(value, handler)),
        SerializeAsAny(),
    ]
"""The type of a CONFIG's `[algorithm]`, of which `name` says which keys it has."""


def _own_or(value: Any, built_in: Callable[[Any], Algorithm]) -> Algorithm:
    """The algorithm of a CONFIG; one of the user's own and its parts are imported here.

    Raises:
        ValueError: a part cannot be loaded, or what `name` names is no algorithm.
    """
    if not isinstance(value, dict):
        return built_in(value)
    try:
        for name in named_parts(value):
            load_part(name)
    except TrainError as error:
        raise ValueError(str(error)) from error
    return _own(value) if _is_own(value) else built_in(value)


def _is_own(values: Json) -> bool:
    return NAMED.fullmatch(str(values.get("name"))) is not None


def _own(values: Json) -> Algorithm:
    """An algorithm of the user's own, which was loaded.

    Raises:
        ValueError: it is no algorithm, has not these keys, or needs what nothing gives.
    """
    kind = loaded(str(values["name"]))
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(
            f"{values['name']!r} is no subclass of rollbook.train.algorithms.algorithm.Algorithm"
        )
    made = kind.model_validate_json(json.dumps(values))
    if unknown := sorted(made.needs - set(NEEDS)):
        raise ValueError(
            f"{values['name']!r} needs {', '.join(map(repr, unknown))}, which nothing gives: choose of "
            f"{', '.join(NEEDS)}"
        )
    return made


def _of_then(values: Json) -> Json:
    """A manifest's keys, with what its release did where it had no key for it yet. A manifest has every key
    of its release."""
    if "reward_moments" in values and "reward_moments_of" not in values:
        return values | {"reward_moments_of": "samples"}
    return values


def recorded_algorithm(values: Json) -> Algorithm:
    """The algorithm that a manifest names.

    Raises:
        TrainError: this release has none of that name, or not with these keys.
    """
    values = _of_then(values)
    name = str(values.get("name"))
    for own in named_parts(values):
        loaded(own)
    if name not in ALGORITHMS and not _is_own(values):
        raise TrainError(
            f"algorithm {name!r} is unknown to this release ({', '.join(ALGORITHMS)}): use the release that "
            "recorded the step"
        )
    try:
        if _is_own(values):
            return _own(values)
        # JSON mode: a list that was read from the log serves as a tuple.
        return ALGORITHMS[name].model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = refused(error, values)[0]
        text = f"algorithm {name!r}, key {first.key!r}: {first.text or 'unknown key'}"
        raise TrainError(text) from error
    except ValueError as error:
        raise TrainError(str(error)) from error


def sent_algorithm(values: Json) -> Algorithm:
    """The algorithm that another rank of the same training names, whose own parts are imported here too.

    Raises:
        TrainError: a part cannot be loaded here.
    """
    for name in named_parts(values):
        load_part(name)
    return recorded_algorithm(values)
