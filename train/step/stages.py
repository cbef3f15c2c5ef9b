"""The stages of a step."""

from __future__ import annotations

STAGES = (
    "input_weights",
    "input_optimizer",
    "reference_weights",
    "critic_input_weights",
    "critic_input_optimizer",
    "rng",
    "samples",
    "routed_experts",
    "old_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "importance_weights",
    "values",
    "rewards",
    "margins",
    "batch_score",
    "advantages",
    "returns",
    "logprobs",
    "scores",
    "losses",
    "gradients",
    "optimizer",
    "weights",
    "value_losses",
    "critic_gradients",
    "critic_optimizer",
    "critic_weights",
)
"""Every stage that a step may have, each after those it depends on, so that the first one that differs is the
cause.

`old_logprobs` are the engine's; `proximal_logprobs` those of the trainer's weights as the rollout batch
began."""
