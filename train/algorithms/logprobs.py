"""Log-probabilities of tokens, and the entropy of the distributions that they are of. Pure torch."""

from __future__ import annotations

import torch


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


def row_distributions(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every token in one place each, float32 [N, V]; `temperatures` are [N]."""
    scaled = logits.float()
    if bool((temperatures != 1).any()):  # else the same bits, and one copy of the logits less
        scaled = scaled / temperatures.unsqueeze(-1)
    return scaled.log_softmax(-1)


def picked(distributions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each distribution [B, T - 1, V] the value of the token [B, T] that came."""
    return distributions.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def entropies(distributions: torch.Tensor) -> torch.Tensor:
    """Entropy of each distribution in nats, [B, T - 1]. One sample at a time, which bounds the memory."""
    return torch.stack([-(one.exp() * one).sum(-1) for one in distributions])
