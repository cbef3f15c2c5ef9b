"""Simple preference optimization: pairs of samples, without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.preferences import Pairs, gaps_of, of_samples, ratings, shares_of

if TYPE_CHECKING:
    import torch


class Simpo(Pairs):
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734), from recorded preferences or from
    rewards: no reference, and all samples count alike, however long."""

    name: Literal["simpo"]
    """The algorithm that the other keys of the table belong to."""
    beta: Annotated[float, Field(gt=0)] = 2.0
    """What the difference of a pair's mean logprobs is multiplied by."""
    target_margin: Annotated[float, Field(ge=0)] = 1.0
    """What that product is to exceed: the paper's gamma, which it takes to be 0.3 to 0.5 of beta."""

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """-log sigma(beta gap - gamma) of a pair, in equal shares on the trained tokens of both samples,
        [B, T - 1]. Source: equation 6."""
        from torch.nn.functional import logsigmoid

        return shares_of(-logsigmoid(self.beta * _gaps(inputs) - self.target_margin), inputs.mask)

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Of each pair: whether the policy prefers the chosen sample, by its mean logprob, and beta times by
        how much."""
        gaps = _gaps(inputs)
        return ratings(gaps, self.beta * gaps)


def _gaps(inputs: LossInputs) -> torch.Tensor:
    """Mean logprob of the chosen sample less that of the rejected one, of each pair, [B / 2]."""
    return gaps_of(of_samples(inputs.logprobs, inputs.mask, mean=True))
