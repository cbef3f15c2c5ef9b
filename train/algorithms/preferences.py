"""Losses over pairs of samples, of which one is preferred: direct preference optimization and its kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rollbook.store.config import Positive
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

if TYPE_CHECKING:
    import torch


class Pairs(Algorithm):
    """Where pairs come from, and how many a step takes. The chosen sample of a pair comes before
    the rejected one."""

    pairs: Literal["preferences", "rewards"] = "preferences"
    """Which pairs there are: the recorded preferences, in epochs; or of each group the trajectory of the
    greatest reward and that of the least, once."""
    batch_size: Positive = 32
    """Pairs per step."""
    group_size: Annotated[int, Field(ge=2)] = 2
    """With `pairs = "rewards"`: trajectories per group."""

    @model_validator(mode="after")
    def _grouped(self) -> Pairs:
        if self.pairs == "preferences" and "group_size" in self.model_fields_set and self.group_size != 2:
            raise ValueError('group_size belongs to pairs = "rewards"')
        return self

    @property
    def cycles(self) -> bool:
        """Recorded preferences are gone over again and again."""
        return self.pairs == "preferences"

    @property
    def needs(self) -> frozenset[Need]:
        """Pairs; and groups and rewards, where the pairs are made of them."""
        return frozenset({"pairs"} if self.pairs == "preferences" else {"pairs", "groups", "rewards"})

    @property
    def demand(self) -> Demand:
        """A step uses `batch_size` pairs, each of them a group."""
        return Demand(self.batch_size, self.group_size)

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """1 for chosen samples and -1 for rejected ones, [N]."""
        return Advantages(np.where(np.arange(len(rollouts.rewards)) % 2 == 0, 1.0, -1.0))

    def divisor(self, totals: Totals) -> int:
        """The number of pairs."""
        return totals.samples // 2


class Dpo(Pairs):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290), from recorded preferences or
    from rewards."""

    name: Literal["dpo"]
    """The algorithm that the other keys of the table belong to."""
    preference_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a pair: minus the logarithm of the probability of the preference, or IPO's square."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How far the policy is kept to the reference: the greater, the nearer."""
    length_normalized: bool = False
    """Whether the log-ratio of a sample is the mean over its trained tokens, instead of the sum."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With `sigmoid`: the probability that a preference was recorded the wrong way round."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean cross-entropy of the chosen sample's tokens, which is added to the loss."""
    reference_version: Annotated[int, Field(ge=0)] = 0
    """The policy version that is the reference, of which there must be a checkpoint: 0 is the model that the
    run starts from."""
    ref_update_interval: Positive | None = None
    """Optimizer steps after which the policy's newest version takes the reference's place, again and again,
    each time at the end of a rollout batch; absent: the reference stays."""

    @model_validator(mode="after")
    def _smoothed(self) -> Dpo:
        if self.label_smoothing and self.preference_loss != "sigmoid":
            raise ValueError('label_smoothing belongs to preference_loss = "sigmoid"')
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """The reference's logprobs too."""
        return super().needs | {"reference"}

    @property
    def reference(self) -> int | None:
        """Its key's."""
        return self.reference_version

    @property
    def reference_interval(self) -> int | None:
        """Its key's."""
        return self.ref_update_interval

    @property
    def adapts(self) -> bool:
        """The reference may change."""
        return self.ref_update_interval is not None

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """The loss of a pair, in equal shares on the trained tokens of both its samples, [B, T - 1]."""
        losses = PREFERENCE_LOSSES[self.preference_loss](self._gaps(inputs), self)
        if self.sft_weight:
            losses = losses - self.sft_weight * of_samples(inputs.logprobs, inputs.mask, mean=True)[0::2]
        return shares_of(losses, inputs.mask)

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Of each pair: whether the implicit reward, beta times the log-ratio, prefers the chosen sample, and
        by how much; and how much likelier a token of the chosen one is than under the reference."""
        assert inputs.reference_logprobs is not None
        gaps, ratios = self._gaps(inputs), inputs.logprobs - inputs.reference_logprobs
        chosen = of_samples(ratios, inputs.mask, mean=True)[0::2]
        return ratings(gaps, self.beta * gaps) | {"chosen_logratio": chosen}

    def _gaps(self, inputs: LossInputs) -> torch.Tensor:
        """Log-ratio of the chosen sample less that of the rejected one, of each pair, [B / 2]."""
        assert inputs.reference_logprobs is not None
        ratios = inputs.logprobs - inputs.reference_logprobs
        return gaps_of(of_samples(ratios, inputs.mask, mean=self.length_normalized))


def of_samples(values: torch.Tensor, mask: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """The sum, or the mean, over each sample's trained tokens: [B] of [B, T - 1]."""
    sums = values.where(mask, values.new_zeros(())).sum(-1)
    return sums / mask.sum(-1).clamp(min=1) if mean else sums


def gaps_of(values: torch.Tensor) -> torch.Tensor:
    """The chosen sample's value less the rejected one's, of each pair: [B / 2] of [B]."""
    return values[0::2] - values[1::2]


def ratings(gaps: torch.Tensor, margins: torch.Tensor) -> dict[str, torch.Tensor]:
    """The measures of pairs [B / 2]: whether each is rated as it was judged, which a gap above 0 says, and by
    how much."""
    return {"preference_accuracy": (gaps > 0).float(), "preference_margin": margins}


def shares_of(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The losses of pairs [B / 2], in equal shares on the trained tokens of both samples, [B, T - 1]."""
    counts = mask.sum(-1)
    shares = losses / (counts[0::2] + counts[1::2]).clamp(min=1)
    return shares.repeat_interleave(2)[:, None].expand(mask.shape)


def sigmoid(gaps: torch.Tensor, keys: Dpo) -> torch.Tensor:
    """-(1 - e) log sigma(beta gap) - e log sigma(-beta gap), with e the label smoothing.

    Source: Rafailov et al. 2023, equation 7; e of conservative DPO, Mitchell 2023. `length_normalized` is
    Tulu 3's, Lambert et al. 2024 (arXiv:2411.15124), equation 6.
    """
    from torch.nn.functional import logsigmoid

    scaled, smoothing = keys.beta * gaps, keys.label_smoothing
    return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)


def identity(gaps: torch.Tensor, keys: Dpo) -> torch.Tensor:
    """(gap - 1 / (2 beta))^2. Source: IPO, Azar et al. 2023 (arXiv:2310.12036), equation 17.

    The paper's log-ratios are sums, as OpenRLHF has them; TRL takes means, which `length_normalized` does.
    """
    return (gaps - 1 / (2 * keys.beta)).square()


PREFERENCE_LOSSES: Mapping[str, Callable[[torch.Tensor, Dpo], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": identity,
}
"""Key -> the loss of pairs, [B / 2], of their gaps [B / 2]."""
