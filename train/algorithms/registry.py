"""The registry of algorithms, among them named combinations of the parts of a policy gradient, whose keys may
still be set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, WrapValidator

from rollbook.store.config import invalid_values
from rollbook.store.errors import TrainError
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import NEEDS, Algorithm
from rollbook.train.algorithms.orpo import Orpo
from rollbook.train.algorithms.parts import NAMED, load_part, loaded_part, named_parts
from rollbook.train.algorithms.policy_gradient import (
    Baseline,
    ClipHigh,
    ClipLow,
    Correction,
    CorrectionHigh,
    Deviation,
    GroupPolicyGradient,
    GroupSize,
    Grpo,
    Normalization,
    Old,
    Surrogate,
    Whitening,
)
from rollbook.train.algorithms.ppo import Ppo
from rollbook.train.algorithms.preferences import Dpo
from rollbook.train.algorithms.reward_models import RewardModel
from rollbook.train.algorithms.sft import Sft
from rollbook.train.algorithms.simpo import Simpo


class PolicyGradient(GroupPolicyGradient):
    """A policy gradient over groups, without a critic, composed by its keys; all defaults are `grpo`."""

    name: Literal["policy_gradient"]
    """The algorithm that the other keys of the table belong to."""


class Rloo(GroupPolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740), with PPO's clip."""

    name: Literal["rloo"]
    """The algorithm that the other keys of the table belong to."""
    baseline: Baseline = "leave_one_out"
    deviation: Deviation = "none"


class ReinforcePlusPlus(GroupPolicyGradient):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): no groups; advantages are whitened over the rollout batch."""

    name: Literal["reinforce_plus_plus"]
    """The algorithm that the other keys of the table belong to."""
    group_size: GroupSize = 1
    baseline: Baseline = "none"
    deviation: Deviation = "none"
    whitening: Whitening = "unbiased"


class ReinforcePlusPlusBaseline(GroupPolicyGradient):
    """REINFORCE++-baseline (arXiv:2501.03262): rewards less their group's mean, whitened over the batch."""

    name: Literal["reinforce_plus_plus_baseline"]
    """The algorithm that the other keys of the table belong to."""
    deviation: Deviation = "none"
    whitening: Whitening = "unbiased"


class DrGrpo(GroupPolicyGradient):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): no deviation, one length for all samples."""

    name: Literal["dr_grpo"]
    """The algorithm that the other keys of the table belong to."""
    deviation: Deviation = "none"
    normalizer: Normalization = "constant"


class Dapo(GroupPolicyGradient):
    """The loss of DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO with a higher upper clip."""

    name: Literal["dapo"]
    """The algorithm that the other keys of the table belong to."""
    clip_high: ClipHigh = 0.28


class Gspo(GroupPolicyGradient):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071), with the paper's clips."""

    name: Literal["gspo"]
    """The algorithm that the other keys of the table belong to."""
    surrogate: Surrogate = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    normalizer: Normalization = "sequence_mean"


class Cispo(GroupPolicyGradient):
    """CISPO of MiniMax-M1 (Chen et al. 2025, arXiv:2506.13585): weights are clipped from above only."""

    name: Literal["cispo"]
    """The algorithm that the other keys of the table belong to."""
    surrogate: Surrogate = "cispo"
    clip_low: ClipLow = 1.0


class DecoupledPpo(GroupPolicyGradient):
    """Decoupled PPO without a critic (AReaL, Fu et al. 2025, arXiv:2505.24298), equation 5: ratios are taken
    to the trainer's policy as the batch begins, and tokens weighted by its ratio to the engine's, up to 5."""

    name: Literal["decoupled_ppo"]
    """The algorithm that the other keys of the table belong to."""
    old: Old = "trainer"
    correction: Correction = "tis"
    correction_high: CorrectionHigh = 5.0


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
    "simpo": Simpo,
    "orpo": Orpo,
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
    """The algorithm of a CONFIG. The user's own algorithm and parts are imported here.

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
    return _own_algorithm(value) if _is_own(value) else built_in(value)


def _is_own(values: Json) -> bool:
    return NAMED.fullmatch(str(values.get("name"))) is not None


def _own_algorithm(values: Json) -> Algorithm:
    """The user's own algorithm, which was loaded.

    Raises:
        ValueError: it is no algorithm, does not have these keys, or needs what nothing gives.
    """
    kind = loaded_part(str(values["name"]))
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(
            f"{values['name']!r} is no subclass of rollbook.train.algorithms.algorithm.Algorithm"
        )
    algorithm = kind.model_validate_json(json.dumps(values))
    if unknown := sorted(algorithm.needs - set(NEEDS)):
        raise ValueError(
            f"{values['name']!r} needs {', '.join(map(repr, unknown))}, which nothing gives: choose of "
            f"{', '.join(NEEDS)}"
        )
    return algorithm


def recorded_algorithm(values: Json) -> Algorithm:
    """The algorithm that a manifest names.

    Raises:
        TrainError: this release has none of that name, or not with these keys.
    """
    if "reward_moments" in values and "reward_moments_of" not in values:  # as releases without that key did
        values = values | {"reward_moments_of": "samples"}
    name = str(values.get("name"))
    for own in named_parts(values):
        loaded_part(own)
    if name not in ALGORITHMS and not _is_own(values):
        raise TrainError(
            f"algorithm {name!r} is unknown to this release ({', '.join(ALGORITHMS)}): use the release that "
            "recorded the step"
        )
    try:
        if _is_own(values):
            return _own_algorithm(values)
        # JSON mode: a list that was read from the log serves as a tuple.
        return ALGORITHMS[name].model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = invalid_values(error, values)[0]
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
