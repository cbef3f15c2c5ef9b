"""A policy's outputs for the tokens of a micro-batch, padded or packed, in one layout:
log-probabilities and entropies of tokens, or a reward model's scores and their loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollbook.train.algorithms.algorithm import Algorithm, ScoreInputs
from rollbook.train.batches.batch import MicroBatch

ROWS = 512
"""Distributions whose entropy is computed at once, which bounds the memory."""


def logprobs_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Log-probability of each actual token, [B, T - 1]. It is sent to other processes."""
    return Predictions(logits, micro).logprobs()


class Predictions:
    """The policy's distributions for the tokens of a micro-batch.

    Which ones are trained is known on the host, so no device is waited for.

    Args:
        logits: [B, T, V]; or of a packed micro-batch [N, V], of its N trained tokens.
    """

    def __init__(self, logits: torch.Tensor, micro: MicroBatch) -> None:
        self._device, self._places = logits.device, None
        if micro.lengths is None:
            self._distributions = log_distributions(logits, self._placed(micro.temperatures))
            self._tokens = self._placed(micro.tokens)
        else:
            mask = micro.loss_mask[:, 1:]
            self._shape, self._places = mask.shape, self._placed(np.flatnonzero(mask))
            self._distributions = self._of_rows(logits, micro.temperatures[:, 1:][mask])
            self._tokens = self._placed(micro.tokens[:, 1:][mask])

    def logprobs(self) -> torch.Tensor:
        """Log-probability of each actual token, [B, T - 1]; of a packed micro-batch 0 where none is
        trained."""
        if self._places is None:
            return picked(self._distributions, self._tokens)
        return self._spread(self._distributions.gather(-1, self._tokens.unsqueeze(-1)).squeeze(-1))

    def entropies(self) -> torch.Tensor:
        """Entropy of each distribution in nats, [B, T - 1]; of a packed micro-batch 0 where no token is
        trained."""
        if self._places is None:
            return entropies(self._distributions)
        rows = [-(some.exp() * some).sum(-1) for some in torch.split(self._distributions, ROWS)]
        return self._spread(torch.cat(rows))

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of trained tokens [N] at their places, [B, T - 1]."""
        assert self._places is not None
        placed = torch.zeros(math.prod(self._shape), dtype=values.dtype, device=self._device)
        return placed.index_put((self._places,), values).view(self._shape)

    def _of_rows(self, logits: torch.Tensor, temperatures: npt.NDArray[np.float32]) -> torch.Tensor:
        """Log-probabilities of every token in one place each, float32 [N, V]; `temperatures` are [N]."""
        scaled = logits.float()
        if (temperatures != 1).any():  # else the same bits, and one copy of the logits less
            scaled = scaled / self._placed(temperatures).unsqueeze(-1)
        return scaled.log_softmax(-1)

    def _placed(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def sample_scores(scores: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The head's output at each sample's last trained token, [B, k] of scores [B, T, k].

    That token ends the path unless a tool's result does, so this is what transformers' models
    for sequence classification give.
    """
    last = np.where(micro.loss_mask, np.arange(micro.loss_mask.shape[1]), 0).max(-1)
    at = torch.from_numpy(last).to(scores.device, non_blocking=True)
    return scores[torch.arange(len(last), device=scores.device), at]


def score_inputs(scores: torch.Tensor, micro: MicroBatch) -> ScoreInputs:
    """The inputs of a micro-batch's loss, from scores [B, T, k]."""
    assert micro.margins is not None
    assert micro.rewards is not None
    margins, rewards = (torch.from_numpy(array).to(scores.device) for array in (micro.margins, micro.rewards))
    return ScoreInputs(sample_scores(scores, micro), margins, rewards, micro.batch_score)


def score_loss(
    scores: torch.Tensor, micro: MicroBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(losses [B], scores [B, k], the algorithm's measures) from scores [B, T, k]."""
    inputs = score_inputs(scores, micro)
    loss = algorithm.score_loss(inputs)
    with torch.no_grad():
        measured = algorithm.score_measures(inputs)
    return loss, inputs.scores, measured


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, float32 [B, T - 1], of softmax(logits / temperature).

    Args:
        logits: [B, T, V]; tokens: int64 [B, T]; temperatures: float32 [B, T], of the token sampled.
    """
    return picked(log_distributions(logits, temperatures), tokens)


def log_distributions(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every token in the next place, float32 [B, T - 1, V]."""
    scaled = logits[:, :-1].float() / temperatures[:, 1:].unsqueeze(-1)
    return scaled.log_softmax(-1)


def picked(distributions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The value of the actual token [B, T] in each distribution [B, T - 1, V]."""
    return distributions.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def entropies(distributions: torch.Tensor) -> torch.Tensor:
    """Entropy of each distribution in nats, [B, T - 1]. One sample at a time, which bounds the memory."""
    return torch.stack([-(distribution.exp() * distribution).sum(-1) for distribution in distributions])
