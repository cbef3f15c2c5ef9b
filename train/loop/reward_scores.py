"""A reward model's scores of a micro-batch, and their loss."""

from __future__ import annotations

import numpy as np
import torch

from rollbook.train.algorithms.algorithm import Algorithm, ScoreInputs
from rollbook.train.data.batch import MicroBatch


def sample_scores(scores: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """What the head gives each sample's last trained token, [B, k] of scores [B, T, k].

    That token ends the path unless a tool's result does, so this is what transformers' models for sequence
    classification give.
    """
    last = np.where(micro.loss_mask, np.arange(micro.loss_mask.shape[1]), 0).max(-1)
    at = torch.from_numpy(last).to(scores.device)
    return scores[torch.arange(len(last), device=scores.device), at]


def score_inputs(scores: torch.Tensor, micro: MicroBatch) -> ScoreInputs:
    """What the loss of a micro-batch is computed from, of scores [B, T, k]."""
    assert micro.margins is not None
    assert micro.rewards is not None
    margins, rewards = (torch.from_numpy(of).to(scores.device) for of in (micro.margins, micro.rewards))
    return ScoreInputs(sample_scores(scores, micro), margins, rewards, micro.batch_score)


def score_loss(
    scores: torch.Tensor, micro: MicroBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(losses [B], scores [B, k], what the algorithm measures) of scores [B, T, k]."""
    inputs = score_inputs(scores, micro)
    loss = algorithm.score_loss(inputs)
    with torch.no_grad():
        measured = algorithm.score_measures(inputs)
    return loss, inputs.scores, measured
