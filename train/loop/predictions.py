"""What a policy says of the tokens of a micro-batch, padded or packed, as arrays of one form."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from rollbook.train.algorithms.logprobs import entropies, log_distributions, picked, row_distributions
from rollbook.train.data.batch import MicroBatch

ROWS = 512
"""Distributions whose entropy is computed at once, which bounds the memory."""


def logprobs_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Log-probability of each token that came, [B, T - 1]. Other processes are sent it."""
    return Predictions(logits, micro).logprobs()


class Predictions:
    """The distributions that the tokens of a micro-batch are drawn from, by the policy.

    Args:
        logits: [B, T, V]; or of a packed micro-batch [N, V], of its N trained tokens.
    """

    def __init__(self, logits: torch.Tensor, micro: MicroBatch) -> None:
        self._device, packed = logits.device, micro.lengths is not None
        self._mask = self._placed(micro.loss_mask[:, 1:]) if packed else None
        if self._mask is None:
            self._of = log_distributions(logits, self._placed(micro.temperatures))
            self._tokens = self._placed(micro.tokens)
        else:
            self._of = row_distributions(logits, self._placed(micro.temperatures[:, 1:])[self._mask])
            self._tokens = self._placed(micro.tokens[:, 1:])[self._mask]

    def logprobs(self) -> torch.Tensor:
        """Log-probability of each token that came, [B, T - 1]; of a packed micro-batch 0 where none is
        trained."""
        if self._mask is None:
            return picked(self._of, self._tokens)
        return self._spread(self._of.gather(-1, self._tokens.unsqueeze(-1)).squeeze(-1))

    def entropies(self) -> torch.Tensor:
        """Entropy of each distribution in nats, [B, T - 1]; of a packed micro-batch 0 where no token is
        trained."""
        if self._mask is None:
            return entropies(self._of)
        rows = [-(some.exp() * some).sum(-1) for some in self._of.split(ROWS)]
        return self._spread(torch.cat(rows))

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of trained tokens [N] at their places, [B, T - 1]."""
        assert self._mask is not None
        placed = torch.zeros(self._mask.shape, dtype=values.dtype, device=self._device)
        return placed.index_put((self._mask,), values)

    def _placed(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
