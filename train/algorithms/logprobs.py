"""Log-probabilities of tokens. Pure torch."""

from __future__ import annotations

import torch


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, float32 [B, T - 1], of softmax(logits / temperature).

    Args:
        logits: [B, T, V]; tokens: int64 [B, T]; temperatures: float32 [B, T], of the token sampled.
    """
    scaled = logits[:, :-1].float() / temperatures[:, 1:].unsqueeze(-1)
    return scaled.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
