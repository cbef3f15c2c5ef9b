"""The registry of algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError

from rollbook.store.errors import TrainError
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.grpo import Grpo
from rollbook.train.algorithms.policy_gradient import Cispo, Dapo, DrGrpo, Gspo, PolicyGradient, Rloo
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
}
"""Name -> algorithm, in the order in which pages show them."""

if TYPE_CHECKING:
    AnyAlgorithm = Algorithm
else:
    AnyAlgorithm = Annotated[reduce(or_, ALGORITHMS.values()), Field(discriminator="name")]
"""The type of a CONFIG's `[algorithm]`, of which `name` says which keys it has."""


def recorded_algorithm(values: Json) -> Algorithm:
    """The algorithm that a manifest names.

    Raises:
        TrainError: this release has none of that name, or not with these keys.
    """
    name = str(values.get("name"))
    if name not in ALGORITHMS:
        raise TrainError(
            f"algorithm {name!r} is unknown to this release ({', '.join(ALGORITHMS)}): use the release that "
            "recorded the step"
        )
    try:
        return ALGORITHMS[name].model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise TrainError(
            f"algorithm {name!r}, key {key!r}: {first['msg']} (got {first['input']!r})"
        ) from error
