"""Odds ratio preference optimization: imitation of chosen samples, and a preference for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.preferences import Pairs, gaps_of, of_samples, ratings, shares_of

if TYPE_CHECKING:
    import torch

CERTAIN = -1e-7
"""The greatest mean logprob that odds are taken of: beyond, a probability is 1 in float32."""


class Orpo(Pairs):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691), from recorded preferences or
    from rewards: no reference, and no supervised training before."""

    name: Literal["orpo"]
    """The algorithm that the other keys of the table belong to."""
    odds_weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the preference beside the cross-entropy of the chosen sample: the paper's lambda."""

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """The mean cross-entropy of the chosen sample's tokens, plus `odds_weight` times -log sigma of the
        logarithm of the odds' ratio: of a pair, in equal shares on the trained tokens of both samples,
        [B, T - 1]. Source: equations 6 and 7."""
        from torch.nn.functional import logsigmoid

        chosen = of_samples(inputs.logprobs, inputs.mask, mean=True)[0::2]
        return shares_of(-chosen - self.odds_weight * logsigmoid(_gaps(inputs)), inputs.mask)

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Of each pair: whether the policy gives the chosen sample the greater odds, and the logarithm of
        their ratio."""
        gaps = _gaps(inputs)
        return ratings(gaps, gaps)


def _gaps(inputs: LossInputs) -> torch.Tensor:
    """Logarithm of the ratio of the odds p / (1 - p) of the chosen sample and of the rejected one, of each
    pair, [B / 2]; p is the geometric mean of the probabilities of a sample's tokens."""
    means = of_samples(inputs.logprobs, inputs.mask, mean=True).clamp(max=CERTAIN)
    return gaps_of(means - (-means.expm1()).log())
