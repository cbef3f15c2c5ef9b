"""The head of a model that gives each token scores: a critic's value, or a reward model's reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.train.model.shape import ModelShape

SCORE = "score.weight"
"""Name of the head's weight."""


def critic_shape(shape: ModelShape) -> ModelShape:
    """The shape of a policy's critic: one value for each token."""
    return replace(shape, scores=1)


def with_head(weights: Tensors, shape: ModelShape) -> Tensors:
    """A policy's weights with a head of scores, which gives 0, in place of the output.

    Args:
        shape: of the model with that head.
    """
    own = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    return own | {SCORE: torch.zeros(shape.scores, shape.hidden)}


class ScoreHead(torch.nn.Linear):
    """A linear map from each token's hidden state to its scores, computed in float32, without a
    bias; at first all scores are 0.

    It replaces Megatron's output layer, and is called in the same way. Hugging Face's
    `ForSequenceClassification` models call its weight `score.weight`.
    """

    def __init__(self, hidden: int, scores: int) -> None:
        super().__init__(hidden, scores, bias=False)
        torch.nn.init.zeros_(self.weight)

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        """Scores [T, B, scores] of hidden states [T, B, hidden]; there is no bias to add later."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None
