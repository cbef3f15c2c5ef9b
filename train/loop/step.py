"""One optimizer step: the same code for training and for its replay.

A step is a function of its manifest, the samples the manifest names, and the policy's state. Its
result is a digest per stage, in the order in which the stages depend on each other.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from rollbook.ingest.engines.weights.digests import digest_tensors
from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.algorithm import Algorithm, LossInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.data.batch import Batch, MicroBatch
from rollbook.train.loop import metrics
from rollbook.train.loop.critic import run_critic
from rollbook.train.loop.finite import check_batch, check_samples, check_tensors, check_tokens
from rollbook.train.loop.predictions import Predictions
from rollbook.train.loop.reward_scores import score_loss
from rollbook.train.megatron.backend import TrainablePolicy

STAGES = (
    "input_weights",
    "input_optimizer",
    "reference_weights",
    "critic_input_weights",
    "critic_input_optimizer",
    "rng",
    "samples",
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """Digest of each stage after the input ones, and the step's metrics."""

    digests: Json
    metrics: Json


def step_seed(seed: int, step: int) -> int:
    """Seed of a step's random generators: a pure function of the run's seed and the step."""
    digest = hashlib.sha256(struct.pack("<qq", seed, step)).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def rng_digest() -> str:
    """Digest of torch's generator state (and of CUDA's where there is one)."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return digest_tensors(states)


def input_digests(policy: TrainablePolicy, seed: int) -> Json:
    """Seed the generators and digest what the step starts from."""
    policy.seed_step(seed)
    return {
        "input_weights": policy.weights_digest(),
        "input_optimizer": policy.optimizer_digest(),
        "rng": rng_digest(),
    }


def run_step(
    policy: TrainablePolicy,
    plan: StepPlanned,
    batch: Batch,
    *,
    finite: bool = True,
    critic: TrainablePolicy | None = None,
) -> StepResult:
    """Forward, backward, optimizer, and then the critic's. The generators were seeded by `input_digests`.

    Args:
        critic: of an algorithm that has one.
        finite: end before the optimizer's step where a number is not finite. Steps that were committed with
            such numbers, by an earlier Rollbook, are run again without it.

    Raises:
        NotFiniteError: it names the stage, and the sample or tensor, in which it began.
    """
    algorithm = recorded_algorithm(plan.algorithm)
    result = _run_policy(policy, plan, algorithm, batch, finite=finite)
    if critic is None:
        return result
    learnt = run_critic(critic, plan, algorithm, batch, finite=finite)
    return StepResult(result.digests | learnt.digests, result.metrics | learnt.metrics)


def _run_policy(
    policy: TrainablePolicy, plan: StepPlanned, algorithm: Algorithm, batch: Batch, *, finite: bool
) -> StepResult:
    """The policy's part of a step; its weights stay as they are while the critic learns alone."""
    divisor = max(algorithm.divisor(Totals(batch.trained_tokens, batch.trained_samples)), 1)
    given = "scores" if algorithm.head_width else "logprobs"
    kept: dict[str, list[torch.Tensor]] = {given: [], "losses": [], "sums": []}
    seen = metrics.TokenValues()
    check = check_samples if algorithm.head_width else check_tokens

    def loss_of(outputs: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        if algorithm.head_width:
            loss, values, measured = score_loss(outputs, micro, algorithm)
            seen.measure(measured)
        else:
            loss, values = _micro_loss(outputs, micro, algorithm, plan.policy_version, seen)
        total = algorithm.add(loss, torch.from_numpy(micro.loss_mask[:, 1:]).to(loss.device))
        for name, value in zip(kept, (values, loss, total), strict=True):
            kept[name].append(value.detach())
        return total / divisor

    if finite:
        check_batch(batch, exact="logprobs" in algorithm.needs)
    policy.forward_backward(batch.micro_batches, loss_of)
    if finite:
        for stage in (given, "losses"):
            check(stage, kept[stage], batch, plan.partition)
        check_tensors("gradients", policy.gradients().items())
    gradients = digest_tensors(policy.gradients())
    if plan.critic is not None and plan.critic["alone"]:
        norm = policy.gradient_norm()
    else:
        norm = policy.optimizer_step(plan.learning_rate)
    if finite:
        check_tensors("weights", policy.stream_weights())
    digests = batch.digests() | {
        given: digest_tensors({str(i): t for i, t in enumerate(kept[given])}),
        "losses": digest_tensors({str(i): t for i, t in enumerate(kept["losses"])}),
        "gradients": gradients,
        "optimizer": policy.optimizer_digest(),
        "weights": policy.weights_digest(),
    }
    found = {"loss": float(sum(kept["sums"])) / divisor, "gradient_norm": norm}
    return StepResult(digests, found | metrics.of_batch(batch) | metrics.of_tokens(seen))


def _micro_loss(
    logits: torch.Tensor, micro: MicroBatch, algorithm: Algorithm, version: int, seen: metrics.TokenValues
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked losses, masked logprobs), each [B, T - 1]; `seen` takes what metrics are made of."""
    predictions = Predictions(logits, micro)
    with torch.set_grad_enabled("entropy" in algorithm.needs):
        entropy = predictions.entropies()
    inputs = loss_inputs(predictions.logprobs(), micro, entropy if "entropy" in algorithm.needs else None)
    loss = algorithm.loss(inputs)
    with torch.no_grad():
        _note(seen, inputs, entropy, micro, algorithm, version)
    return torch.where(inputs.mask, loss, 0.0), torch.where(inputs.mask, inputs.logprobs, 0.0)


def loss_inputs(logprobs: torch.Tensor, micro: MicroBatch, entropy: torch.Tensor | None) -> LossInputs:
    """What the loss of a micro-batch is computed from.

    Args:
        logprobs: of its tokens, float32 [B, T - 1].
        entropy: of their distributions, [B, T - 1], for a loss that needs it.
    """

    def placed(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array[:, 1:]).to(logprobs.device)

    def placed_if_any(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
        return None if array is None else placed(array)

    old = placed_if_any(micro.old_logprobs)
    return LossInputs(
        logprobs,
        placed(micro.rollout_logprobs) if old is None else old,
        placed(micro.advantages),
        placed(micro.loss_mask),
        weights=placed_if_any(micro.weights),
        reference_logprobs=placed_if_any(micro.reference_logprobs),
        entropy=entropy,
    )


def _note(
    seen: metrics.TokenValues,
    inputs: LossInputs,
    entropy: torch.Tensor,
    micro: MicroBatch,
    algorithm: Algorithm,
    version: int,
) -> None:
    """Keep what the metrics of a micro-batch are made of."""
    exact = "logprobs" in algorithm.needs
    seen.measure(algorithm.measures(inputs))
    low, high = algorithm.clipped(inputs) or (None, None)
    reference = inputs.reference_logprobs
    rollout = torch.from_numpy(micro.rollout_logprobs[:, 1:]).to(inputs.logprobs.device)
    seen.add(
        inputs.mask,
        micro,
        version,
        engine_gaps=inputs.logprobs - rollout if exact else None,
        log_ratios=inputs.logprobs - inputs.old_logprobs if exact else None,
        reference_gaps=None if reference is None else inputs.logprobs - reference,
        entropies=entropy,
        low=low,
        high=high,
    )
