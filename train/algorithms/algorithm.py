"""The interface of an algorithm: its configuration, the data that it needs, advantages and loss.

A new algorithm is a module beside this one and a line in `registry`. No other code depends on an algorithm's
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rollbook.store.config import Table
from rollbook.store.events import Json
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.rollouts import Advantages, Floats, Ints, Rollouts

if TYPE_CHECKING:
    import torch

Need = Literal[
    "logprobs",
    "rewards",
    "turn_rewards",
    "groups",
    "pairs",
    "margins",
    "old",
    "reference",
    "values",
    "entropy",
    "batch_score",
]
"""What an algorithm may need. Of each sample: logprob and version of each trained token, a reward, rewards of
its turns, a group.
Of samples that they come in `pairs`, the chosen one before the rejected one, in one micro-batch; and by how
much it was recorded as better (`margins`).
Of each token: its logprob by the trainer's weights as the batch began (`old`) and by the reference policy;
the critic's value of the state that it was sampled in (`values`); the entropy of its distribution.
Of the batch the mean score that a reward model gives its samples before the step (`batch_score`)."""
NEEDS: tuple[str, ...] = get_args(Need)
"""All of them."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a loss is computed from; every tensor is [B, T - 1], where position t is about token t + 1.

    Attributes:
        logprobs: float32, of the weights in training; carries the gradient.
        old_logprobs: float32, that ratios are taken to: of the engine that sampled the token (0 where it gave
            none), or of the trainer's weights as the batch began.
        advantages: float32, of the token.
        mask: bool; true where the token is trained. The loss of other tokens is left out afterwards.
        behaviour: float32, of the engine that sampled the token, as recorded: `old_logprobs`, unless those
            are the trainer's.
        totals: counts of the whole batch, of which this is a micro-batch.
        weights: float32, of the correction; None without one.
        reference_logprobs: float32, of the reference policy; None where it is not needed.
        entropy: float32, in nats, of the distribution that the token is one of; carries the gradient; None
            where it is not needed.
        values: float32, of the critic before the rollout batch; None where there is none.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    totals: Totals
    weights: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @staticmethod
    def whole(
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        **others: torch.Tensor | None,
    ) -> LossInputs:
        """The inputs of a whole batch as one micro-batch, which the old policy sampled unless
        `behaviour` says otherwise."""
        behaviour = others.pop("behaviour", None)
        return LossInputs(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            old_logprobs if behaviour is None else behaviour,
            Totals(int(mask.sum()), int(mask.any(-1).sum())),
            **others,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """What the loss of a reward model is computed from. The samples are pairs: chosen, rejected, and so on.

    Attributes:
        scores: float32 [B, k], what its head gives each sample's last trained token; carries the gradient.
        margins: float32 [B], by how much the pair's chosen sample was recorded as better, at that sample; 0
            elsewhere.
        rewards: float32 [B]; NaN where a sample has none.
        batch_score: mean score of the batch's samples before the step; None where it is not needed.
    """

    scores: torch.Tensor
    margins: torch.Tensor
    rewards: torch.Tensor
    batch_score: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a rollout batch is, and how it is used. A sample without a group counts as a group of one.

    Attributes:
        groups: in a rollout batch; group_size: trajectories in each.
        epochs: how often the batch is gone over.
        mini_batches: optimizer steps in each epoch.
    """

    groups: int
    group_size: int = 1
    epochs: int = 1
    mini_batches: int = 1

    @property
    def steps(self) -> int:
        """Optimizer steps taken on one rollout batch."""
        return self.epochs * self.mini_batches


class Algorithm(Table):
    """An algorithm with its configuration. Subclasses have a `name`, a literal, as their first key."""

    @property
    def cycles(self) -> bool:
        """Whether training goes over the samples of a cut again and again; if not, each batch is
        used once."""
        return False

    @property
    def needs(self) -> frozenset[Need]:
        """What it needs of a sample and of the models."""
        return frozenset()

    @property
    def head_width(self) -> int:
        """How many values the model's head gives each token in place of the vocabulary's logits; 0: it is a
        policy, which predicts tokens."""
        return 0

    @property
    def algorithm_name(self) -> str:
        """Its name in a CONFIG and in a manifest."""
        return str(self.model_dump()["name"])

    @property
    def demand(self) -> Demand:
        """The rollout batches that it uses."""
        raise NotImplementedError

    @property
    def reference(self) -> int | None:
        """The policy version that is the reference; None where it needs none."""
        return None

    @property
    def reference_interval(self) -> int | None:
        """Optimizer steps after which the policy's newest version takes the reference's place; None: the
        reference stays."""
        return None

    @property
    def counts_rejected(self) -> bool:
        """Whether tokens of weight 0 count in the normalizer's denominator, and in the other terms of the
        loss."""
        return True

    def advantages(self, rollouts: Rollouts) -> Advantages:
        """Advantages of a rollout batch."""
        raise NotImplementedError

    def weights(self, log_ratios: Floats, lengths: Ints) -> Floats | None:
        """The correction's weight of each trained token, float64 [P]; None where it corrects nothing.

        Args:
            log_ratios: float64 [P], old logprobs less the engine's.
            lengths: int64 [N], trained tokens of each sample.
        """
        return None

    def loss(self, inputs: LossInputs) -> torch.Tensor:
        """Loss of each token, float32 [B, T - 1]."""
        raise NotImplementedError

    def score_loss(self, inputs: ScoreInputs) -> torch.Tensor:
        """Loss of each sample, float32 [B], of an algorithm that trains a reward model."""
        raise NotImplementedError

    def value_loss(
        self, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor
    ) -> torch.Tensor:
        """The critic's loss of each token, float32 [B, T - 1], of an algorithm that has one.

        Args:
            values: of the critic in training, with the gradient; old_values: as the rollout batch began.
            returns: its targets.
        """
        raise NotImplementedError

    def clipped(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where the lower and the upper clip are at work, bool [B, T - 1]; None without clips."""
        return None

    @property
    def adapts(self) -> bool:
        """Whether its keys change from step to step."""
        return False

    def after(self, metrics: Json) -> Algorithm:
        """The algorithm of the next step, given the metrics of this one: the same, except for what
        adapts."""
        return self

    def measures(self, inputs: LossInputs) -> dict[str, torch.Tensor]:
        """Numbers of the micro-batch's samples, pairs or trained tokens by name, each [n]: their mean is a
        metric of the step."""
        return {}

    def score_measures(self, inputs: ScoreInputs) -> dict[str, torch.Tensor]:
        """The same as `measures`, for an algorithm that trains a reward model."""
        return {}

    def fitted(self, measured: Mapping[str, Floats]) -> Json:
        """Metrics of an evaluation that are fitted to the measures of all held-out samples or
        pairs."""
        return {}

    def add(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum of a micro-batch's losses [B, T - 1], which are 0 outside the mask."""
        return losses.sum()

    def divisor(self, totals: Totals) -> int:
        """What the sum over all micro-batches is divided by: by default, the batch's trained tokens."""
        return totals.tokens
