"""The critic: a policy's weights with a head of values, trained beside the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch

from rollbook.engines.weights.digests import digest_tensors, lines_of_stream
from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.batch import Batch, MicroBatch, in_sample_order, without_experts
from rollbook.train.checkpoints.checkpoint import Checkpoint
from rollbook.train.config.config import CriticConfig
from rollbook.train.model.model import Build
from rollbook.train.model.score_head import critic_shape, with_head
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.kept_digests import Trees, digest_of
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.step import evidence
from rollbook.train.step.evidence import Evidence
from rollbook.train.step.finite import FiniteValues, check_tokens
from rollbook.train.step.host_copies import copied_at_once


def restored_critic(
    ranks: Ranks,
    shape: ModelShape,
    config: CriticConfig,
    held: Checkpoint,
    how: Build,
    *,
    goes_on: bool,
    name: str = "critic",
) -> Policy:
    """The critic as it was when a checkpoint was written, or as it starts from the checkpoint's
    policy.

    Args:
        how: it computes, as its policy.
        goes_on: whether the checkpoint belongs to the critic's training.
        name: by which the ranks know it.
    """
    critic = ranks.policy(name, critic_shape(shape), config, how)
    if goes_on and held.critic is not None:
        critic.load_weights(held.critic)
        critic.load_optimizer_state(held.critic_optimizer or {})
    else:
        critic.load_weights(with_head(held.weights, critic_shape(shape)))
    return critic


def recorded_critic(plan: StepPlanned) -> CriticConfig:
    """The critic's configuration that a manifest holds."""
    assert plan.critic is not None
    return CriticConfig.model_validate_json(orjson.dumps(plan.critic["optimizer"]))


def critic_inputs(critic: Policy, trees: Trees) -> Json:
    """Digests of the critic's state at the start of a step."""
    return {
        "critic_input_weights": critic.weights_digest(tree=trees.weights).digest,
        "critic_input_optimizer": critic.optimizer_digest(tree=trees.state).digest,
    }


def token_scores(scores: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The value of the state in which each token was sampled, [B, T - 1], of scores [B, T, 1]."""
    return scores[:, :-1, 0]


@dataclass(frozen=True, slots=True)
class CriticResult:
    """Digests and evidence of the critic's stages, and its metrics."""

    digests: Json
    metrics: Json
    evidence: Evidence


def run_critic(
    critic: Policy, algorithm: Algorithm, learning_rate: float, batch: Batch, *, finite: bool, trees: Trees
) -> CriticResult:
    """The critic's forward, backward and optimizer step: the mean loss over the batch's trained tokens.

    Raises:
        NotFiniteError: it names the stage, and the sample or tensor, in which it began.
    """
    tokens = max(batch.trained_tokens, 1)
    losses = copied_at_once(
        critic.forward_backward(
            without_experts(batch.micro_batches), ValueLoss(algorithm, tokens), batch.shares
        )
    )
    if finite:
        check_tokens("value_losses", losses, batch, batch.partition)
    seen = FiniteValues("critic_gradients")
    lines = lines_of_stream(critic.stream_gradients(), seen if finite else None, tree=trees.state)
    seen.check()
    gradients = digest_of(lines, tree=trees.state)
    norm = critic.optimizer_step(learning_rate)
    seen = FiniteValues("critic_weights")
    weights = critic.weights_digest(seen if finite else None, tree=trees.weights)
    seen.check()
    state = critic.optimizer_digest(tree=trees.state)
    digests = {
        "value_losses": digest_tensors({str(i): t for i, t in enumerate(losses)}),
        "critic_gradients": gradients.digest,
        "critic_optimizer": state.digest,
        "critic_weights": weights.digest,
    }
    arrays = [loss.numpy() for loss in losses]
    parts = evidence.of_tokens(
        batch, value_losses=in_sample_order(batch.micro_batches, batch.partition, arrays)
    ) | evidence.of_tensors(critic_gradients=gradients, critic_optimizer=state, critic_weights=weights)
    total = sum(float(loss.sum()) for loss in losses)
    metrics = {"value_loss": total / tokens, "critic_gradient_norm": norm} | _explained(batch)
    return CriticResult(digests, metrics, parts)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss of a critic's micro-batches: the mean over the trained tokens of the whole batch. It
    is sent to other ranks."""

    algorithm: Algorithm
    tokens: int

    def __call__(self, scores: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's part of the loss, and the loss of each token, [B, T - 1]."""
        mask, old, returns = (
            _placed(array, scores.device) for array in (micro.loss_mask, micro.old_values, micro.returns)
        )
        loss = torch.where(mask, self.algorithm.value_loss(token_scores(scores, micro), old, returns), 0.0)
        return loss.sum() / self.tokens, loss.detach()


def _placed(array: npt.NDArray[Any] | None, device: torch.device) -> torch.Tensor:
    assert array is not None
    return torch.from_numpy(array[:, 1:]).to(device, non_blocking=True)


def _explained(batch: Batch) -> Json:
    """The mean value, and the share of the returns' variance that the old values explain; None if
    that is 0."""
    values, returns = batch.experience.scores.values, batch.experience.advantages.returns
    assert values is not None
    assert returns is not None
    spread = float(np.var(returns))
    left = float(np.var(returns - values))
    return {
        "value_mean": float(values.mean(dtype=np.float64)) if len(values) else None,
        "explained_variance": 1 - left / spread if spread > 0 else None,
    }
