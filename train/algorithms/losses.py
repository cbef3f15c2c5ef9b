"""Per-token losses. Pure torch; every tensor is [B, T - 1]: position t is about token t + 1."""

from __future__ import annotations

import torch

from rollbook.train.config.config import GrpoConfig


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, float32 [B, T - 1], of softmax(logits / temperature).

    Args:
        logits: [B, T, V]; tokens: int64 [B, T]; temperatures: float32 [B, T], of the token sampled.
    """
    scaled = logits[:, :-1].float() / temperatures[:, 1:].unsqueeze(-1)
    return scaled.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def sft_loss(logprobs: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the recorded token."""
    return -logprobs


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    algorithm: GrpoConfig,
) -> torch.Tensor:
    """Clipped surrogate, -min(r A, clip(r, 1 - l, 1 + h) A), r = exp(logprob - old logprob).

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the advantages of GRPO,
    Shao et al. 2024 (arXiv:2402.03300). The old logprobs are those the engine sampled with.
    """
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
