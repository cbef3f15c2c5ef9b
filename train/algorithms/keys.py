"""Types of the keys that name the parts of a policy gradient, and of those whose default is another in some
combination.

The names that a key may have are those of its registry: a function that is added there is a legal value, in a
CONFIG and on the page of all keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rollbook.train.algorithms.baselines import BASELINES
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS
from rollbook.train.algorithms.parts import OwnPart
from rollbook.train.algorithms.regularizers import KL_ESTIMATORS
from rollbook.train.algorithms.surrogates import SURROGATES
from rollbook.train.table import Positive


def _key(description: str) -> object:
    return Field(description=description)


def part_key(names: Iterable[str], description: str) -> Any:
    """The type of a key that names a part: one of a registry, or one's own."""
    return Annotated[Literal[tuple(names)] | OwnPart, _key(description)]


if TYPE_CHECKING:
    Baseline = str
    Surrogate = str
    Normalization = str
    Correction = str
    KlEstimator = str
else:
    Baseline = part_key(
        BASELINES,
        "Subtracted from a reward: its group's mean, the mean of the others of its group, or nothing.",
    )
    Surrogate = part_key(
        SURROGATES,
        "The loss of a token: PPO's, with the ratio of each token or (`gspo`) of its sample; CISPO's; minus "
        "advantage times logprob; or that with DRO's quadratic term.",
    )
    Normalization = part_key(
        NORMALIZERS,
        "The mean over the batch's tokens; the mean over samples of the mean, or of the sum, over a sample's "
        "tokens; or the sum over all tokens, divided by samples times `constant_length`.",
    )
    Correction = part_key(
        ("none", *CORRECTIONS),
        'With old = "trainer": how tokens are weighted by the ratio of the trainer\'s probability to the '
        "engine's. `tis` bounds the ratio, of a token or (`sequence_tis`) of a sample; `icepop` and `mis` "
        "reject tokens or samples beyond the bounds; `sequence_mask_tis` samples by the geometric mean.",
    )
    KlEstimator = part_key(
        KL_ESTIMATORS, "How that divergence is estimated: `train/algorithms/regularizers.py`."
    )

Deviation = Annotated[
    Literal["unbiased", "biased", "none"],
    _key(
        "The group's standard deviation, by which advantages are divided: over n - 1, over n, or not at all."
    ),
]
Whitening = Annotated[
    Literal["none", "unbiased", "biased", "mean"],
    _key(
        "Advantages of all trained tokens of a rollout batch get mean 0 and variance 1 (over n - 1, as in "
        "verl, or over n, as in OpenRLHF), or mean 0 only."
    ),
]
ClipLow = Annotated[float, Field(ge=0), _key("Lower clip: ratios are clipped at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(ge=0), _key("Upper clip: ratios are clipped at 1 + clip_high.")]
Old = Annotated[
    Literal["engine", "trainer"],
    _key(
        "Which policy ratios are taken to: the engine's logprobs as recorded, or those of the trainer's "
        "weights as the rollout batch begins, computed in a forward pass (decoupled PPO, arXiv:2505.24298)."
    ),
]
CorrectionHigh = Annotated[float, Field(gt=0), _key("Upper bound of the correction's ratio.")]
Groups = Annotated[Positive, _key("Groups per rollout batch.")]
GroupSize = Annotated[
    int, Field(ge=1), _key("Trajectories per group; a group is used once it has this many.")
]
Bound = Annotated[float, Field(gt=0)] | Literal["none"]
"""A number above 0, or that nothing is bounded."""
