"""Kahneman-Tversky optimization: samples that are good or bad, each for itself, without pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rollbook.store.config import Positive
from rollbook.train.algorithms.algorithm import Algorithm, Demand, LossInputs, Need
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.preferences import of_samples
from rollbook.train.algorithms.rollouts import Advantages, Rollouts

if TYPE_CHECKING:
    import torch


class Kto(Algorithm):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): each sample is desirable or
    undesirable, and nothing is paired."""

    name: Literal["kto"]
    """The algorithm that the other keys of the table belong to."""
    labels: Literal["rewards", "preferences"] = "rewards"
    """What says which samples are desirable: the rewards of trajectories; or the recorded preferences, whose
    chosen sample is and whose rejected one is not."""
    desirable_above: float = 0.0
    """With `labels = "rewards"`: samples of a greater reward are desirable, all others are not."""
    reference_point: Literal["kl", "zero"] = "kl"
    """What a sample's log-ratio is held against: the divergence of the policy from the reference, estimated
    by the completions of other prompts; or 0, as APO-zero has it (arXiv:2408.06266)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How far the policy is kept to the reference: the greater, the nearer."""
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the loss of desirable samples."""
    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of that of the others. Where there are more of one kind, the paper chooses weights by which
    weight times number of desirable samples is 1 to 4/3 times that of the others."""
    batch_size: Positive = 32
    """Samples per step; with `labels = "preferences"`: pairs of them."""
    reference_version: Annotated[int, Field(ge=0)] = 0
    """The policy version that is the reference, of which there must be a checkpoint: 0 is the model that the
    run starts from."""
    ref_update_interval: Positive | None = None
    """Optimizer steps after which the policy's newest version takes the reference's place, again and again,
    each time at the end of a rollout batch; absent: the reference stays."""

    @model_validator(mode="after")
    def _told_apart(self) -> Kto:
        if self._paired and self.desirable_above:
            raise ValueError('desirable_above belongs to labels = "rewards"')
        if self.batch_size == 1 and self.reference_point == "kl":
            raise ValueError(
                "batch_size 1 leaves no other prompt to complete, by which the divergence is estimated: "
                'take more samples, or set reference_point = "zero"'
            )
        return self

    @property
    def _paired(self) -> bool:
        return self.labels == "preferences"

    @property
    def cycles(self) -> bool:
        """It goes over its samples again and again."""
        return True

    @property
    def needs(self) -> frozenset[Need]:
        """What says the label, the reference's logprobs, and those of mismatched completions."""
        label: Need = "pairs" if self._paired else "rewards"
        needs: set[Need] = {label, "reference"}
        return frozenset(needs | ({"mismatched_kl"} if self.reference_point == "kl" else set()))

    @property
    def demand(self) -> Demand:
        """A step uses `batch_size` samples or pairs, each as a group of one."""
        return Demand(self.batch_size)

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

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """1 for desirable samples and -1 for undesirable ones, [N]."""
        places = np.arange(len(rollouts.rewards))
        desirable = places % 2 == 0 if self._paired else rollouts.rewards > self.desirable_above
        return Advantages(np.where(desirable, 1.0, -1.0))

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """Weight times 1 - sigma(beta (log-ratio - z)) of a desirable sample, 1 - sigma(beta (z - log-ratio))
        of an undesirable one, with z the point of reference: in equal shares on its trained tokens,
        [B, T - 1].

        Source: equation 7 of the paper, less a constant, so that no loss is below 0, as in TRL. The log-ratio
        is the sum over the sample's tokens.
        """
        gaps, labels = self._rated(inputs)
        weights = labels.new_tensor(self.undesirable_weight).expand_as(labels)
        weights = weights.where(labels < 0, labels.new_tensor(self.desirable_weight))
        losses = weights * (-self.beta * gaps).sigmoid()
        return (losses / inputs.mask.sum(-1).clamp(min=1))[:, None].expand(inputs.mask.shape)

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Of each sample whether it is on the side of the point of reference that its label says, and that
        point; of each of a kind beta times its log-ratio, the implicit reward."""
        gaps, labels = self._rated(inputs)
        ratings = self.beta * self._ratios(inputs)
        return {
            "label_accuracy": (gaps > 0).float(),
            "kl_reference": gaps.new_tensor(self._point(inputs)).expand_as(gaps),
            "desirable_rating": ratings[labels > 0],
            "undesirable_rating": ratings[labels < 0],
        }

    def divisor(self, totals: Totals) -> int:
        """The number of samples."""
        return totals.samples

    def _rated(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much each sample's log-ratio is beyond the point of reference, on the side that its label
        says; and the labels, 1 or -1. Both [B]."""
        labels = of_samples(inputs.advantages, inputs.mask, mean=True).sign()
        return labels * (self._ratios(inputs) - self._point(inputs)), labels

    def _ratios(self, inputs: LossInputs) -> torch.Tensor:
        assert inputs.reference_logprobs is not None
        return of_samples(inputs.logprobs - inputs.reference_logprobs, inputs.mask, mean=False)

    def _point(self, inputs: LossInputs) -> float:
        if self.reference_point == "zero":
            return 0.0
        assert inputs.kl_reference is not None
        return inputs.kl_reference
