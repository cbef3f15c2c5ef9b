"""One optimizer step: the same code for training and for its replay.

A step is a function of a batch, of settings, and of the policy's state. Its result is a digest
per stage, in the order in which the stages depend on each other. The caller decides where the
batch and the settings come from: a manifest of the log, or a client's data.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollbook.engines.weights.digests import Look, digest_tensors, lines_of_stream
from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm, LossInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.parts import check_shape
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.batch import Batch, MicroBatch, in_sample_order, micro_batches_of
from rollbook.train.ranks.kept_digests import ALL_TREES, Trees, digest_of
from rollbook.train.ranks.policy import Policy
from rollbook.train.step import evidence, metrics
from rollbook.train.step.critic import run_critic
from rollbook.train.step.evidence import Evidence
from rollbook.train.step.finite import FiniteValues, check_batch, check_samples, check_tokens
from rollbook.train.step.host_copies import copied_at_once
from rollbook.train.step.metrics import of_routing
from rollbook.train.step.predictions import Predictions, score_loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """Digest of each stage after the input ones, and the step's metrics.

    Attributes:
        evidence: of the parts of stages.
    """

    digests: Json
    metrics: Json
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a step beside its batch.

    Attributes:
        learning_rate: of the policy's optimizer.
        version: the policy's as the step begins, from which ages of tokens count.
        critic_learning_rate: of the critic's optimizer, where the algorithm has a critic.
        critic_alone: whether only the critic's weights move.
        trees: which digests are by blocks.
    """

    algorithm: Algorithm
    learning_rate: float
    version: int = 0
    critic_learning_rate: float | None = None
    critic_alone: bool = False
    trees: Trees = ALL_TREES


def step_seed(seed: int, step: int) -> int:
    """Seed of a step's random generators: a pure function of the run's seed and the step."""
    digest = hashlib.sha256(struct.pack("<qq", seed, step)).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def rng_digest(device: torch.device) -> str:
    """Digest of torch's generator state, and of CUDA's where the policy is on such a device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return digest_tensors(states)


def input_digests(policy: Policy, seed: int, trees: Trees) -> Json:
    """Seed the generators, and digest the state that the step starts from."""
    policy.seed_step(seed)
    return {
        "input_weights": policy.weights_digest(tree=trees.weights).digest,
        "input_optimizer": policy.optimizer_digest(tree=trees.state).digest,
        "rng": rng_digest(policy.device),
    }


def run_step(
    policy: Policy,
    settings: StepSettings,
    batch: Batch,
    *,
    finite: bool = True,
    critic: Policy | None = None,
    look: Look | None = None,
) -> StepResult:
    """Forward, backward, optimizer, and then the critic's. The generators were seeded by
    `input_digests`.

    Args:
        critic: of an algorithm that has one.
        finite: stop before the optimizer's step if a number is not finite. Steps that were
            committed with such numbers, by an earlier Rollbook, are run again without it.
        look: called with each of the policy's gradients, before clipping.

    Raises:
        NotFiniteError: it names the stage, and the sample or tensor, in which it began.
    """
    result = _run_policy(policy, settings, batch, finite=finite, look=look)
    if critic is None:
        return result
    assert settings.critic_learning_rate is not None
    rate, trees = settings.critic_learning_rate, settings.trees
    learnt = run_critic(critic, settings.algorithm, rate, batch, finite=finite, trees=trees)
    metrics_of_both = result.metrics | learnt.metrics
    return StepResult(result.digests | learnt.digests, metrics_of_both, result.evidence | learnt.evidence)


def _run_policy(
    policy: Policy,
    settings: StepSettings,
    batch: Batch,
    *,
    finite: bool,
    look: Look | None,
) -> StepResult:
    """The policy's part of a step; its weights stay as they are while the critic learns alone."""
    algorithm, version, trees = settings.algorithm, settings.version, settings.trees
    totals = Totals(batch.trained_tokens, batch.trained_samples)
    loss_of = PolicyLoss(algorithm, version, totals)
    output_stage, check = ("scores", check_samples) if algorithm.head_width else ("logprobs", check_tokens)
    if finite:
        check_batch(batch, exact="logprobs" in algorithm.needs)
    routed = of_routing(policy, algorithm, batch, version)
    micro_losses = on_host(policy.forward_backward(batch.micro_batches, loss_of, batch.shares))
    values, losses = [item.values for item in micro_losses], [item.losses for item in micro_losses]
    if finite:
        check(output_stage, values, batch, batch.partition)
        check("losses", losses, batch, batch.partition)
    seen = FiniteValues("gradients")
    looks = [item for item in (seen if finite else None, look) if item is not None]
    lines = lines_of_stream(policy.stream_gradients(), _combined(looks), tree=trees.state)
    seen.check()
    gradients = digest_of(lines, tree=trees.state)
    alone = settings.critic_alone
    norm = policy.gradient_norm() if alone else policy.optimizer_step(settings.learning_rate)
    seen = FiniteValues("weights")
    weights = policy.weights_digest(seen if finite else None, tree=trees.weights)
    seen.check()
    state = policy.optimizer_digest(tree=trees.state)
    digests = batch.digests() | {
        output_stage: digest_tensors({str(i): t for i, t in enumerate(values)}),
        "losses": digest_tensors({str(i): t for i, t in enumerate(losses)}),
        "gradients": gradients.digest,
        "optimizer": state.digest,
        "weights": weights.digest,
    }
    parts = evidence.of_batch(batch) | _pass_evidence(batch, output_stage, values, losses)
    if output_stage == "logprobs":
        parts |= Evidence(values={"entropies": _entropies(batch, micro_losses)})
    parts |= evidence.of_tensors(gradients=gradients, optimizer=state, weights=weights)
    step_metrics = {
        "loss": float(sum(item.total for item in micro_losses)) / loss_of.divisor,
        "gradient_norm": norm,
    }
    token_values = metrics.all_of([item.seen for item in micro_losses])
    step_metrics |= metrics.of_batch(batch) | metrics.of_tokens(token_values) | routed
    return StepResult(digests, step_metrics, parts)


def _combined(looks: Sequence[Look]) -> Look | None:
    """One callback that calls all of these; None where there are none."""

    def look(name: str, tensor: torch.Tensor) -> None:
        for hook in looks:
            hook(name, tensor)

    return look if looks else None


def _pass_evidence(
    batch: Batch,
    output_stage: str,
    values: Sequence[torch.Tensor],
    losses: Sequence[torch.Tensor],
) -> Evidence:
    """The evidence of a batch's forward and backward passes, by sample."""
    arrays = {
        stage: [t.numpy() for t in parts] for stage, parts in ((output_stage, values), ("losses", losses))
    }
    if output_stage == "logprobs":
        whole = {
            s: in_sample_order(batch.micro_batches, batch.partition, parts) for s, parts in arrays.items()
        }
        return evidence.of_tokens(batch, **whole)
    order = np.argsort([i for part in micro_batches_of(batch.partition) for i in part])
    return evidence.of_samples(**{s: np.concatenate(parts)[order] for s, parts in arrays.items()})


def _entropies(batch: Batch, micro_losses: Sequence[MicroLoss]) -> Singles:
    """The entropy, in nats, of the distribution that each trained token is of, float32 [P]."""
    parts = []
    for micro, loss in zip(batch.micro_batches, micro_losses, strict=True):
        mask = micro.loss_mask[:, 1:]
        whole = np.zeros(mask.shape, np.float32)
        whole[mask] = torch.cat(loss.seen.entropies).float().numpy()
        parts.append(whole)
    return in_sample_order(batch.micro_batches, batch.partition, parts)


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """What is kept of a micro-batch's loss.

    Attributes:
        values: logprobs [B, T - 1], or the scores [B, k] of a reward model; losses: [B, T - 1], or [B]. Both
            are 0 where nothing is trained.
        total: what the micro-batch adds to the sum that is divided for the loss.
        seen: what metrics are made of.
    """

    values: torch.Tensor
    losses: torch.Tensor
    total: torch.Tensor
    seen: metrics.TokenValues


def on_host(kept: Sequence[MicroLoss]) -> list[MicroLoss]:
    """What was kept of all micro-batches, in the host's memory: a device is waited for once."""
    everything = [t for item in kept for t in (item.values, item.losses, item.total, *item.seen.tensors())]
    host = iter(copied_at_once(everything))
    return [MicroLoss(next(host), next(host), next(host), item.seen.of(host)) for item in kept]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of a policy's micro-batches. It is sent to other ranks.

    Attributes:
        version: the policy's, from which ages of tokens count.
        totals: of the whole batch.
    """

    algorithm: Algorithm
    version: int
    totals: Totals

    @property
    def divisor(self) -> int:
        """What the sum over the whole batch is divided by."""
        return max(self.algorithm.divisor(self.totals), 1)

    def __call__(self, outputs: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MicroLoss]:
        """The micro-batch's part of the loss, and what is kept of it."""
        algorithm, token_values = self.algorithm, metrics.TokenValues()
        if algorithm.head_width:
            losses, values, measured = score_loss(outputs, micro, algorithm)
            token_values.measure(measured)
        else:
            losses, values = _micro_loss(outputs, micro, algorithm, self.version, token_values, self.totals)
        mask = torch.from_numpy(micro.loss_mask[:, 1:]).to(losses.device, non_blocking=True)
        total = algorithm.add(losses, mask)
        return total / self.divisor, MicroLoss(values.detach(), losses.detach(), total.detach(), token_values)


def _micro_loss(
    logits: torch.Tensor,
    micro: MicroBatch,
    algorithm: Algorithm,
    version: int,
    token_values: metrics.TokenValues,
    totals: Totals,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked losses, masked logprobs), each [B, T - 1]; the values for metrics are added to
    `token_values`."""
    predictions = Predictions(logits, micro)
    with torch.set_grad_enabled("entropy" in algorithm.needs):
        entropy = predictions.entropies()
    loss_entropy = entropy if "entropy" in algorithm.needs else None
    inputs = loss_inputs(predictions.logprobs(), micro, loss_entropy, totals)
    named = f"algorithm {algorithm.algorithm_name!r}: loss"
    loss = check_shape(named, algorithm.loss(inputs), tuple(inputs.mask.shape))
    with torch.no_grad():
        _note(token_values, inputs, entropy, micro, algorithm, version)
    return torch.where(inputs.mask, loss, 0.0), torch.where(inputs.mask, inputs.logprobs, 0.0)


def loss_inputs(
    logprobs: torch.Tensor, micro: MicroBatch, entropy: torch.Tensor | None, totals: Totals | None = None
) -> LossInputs:
    """The inputs of a micro-batch's loss.

    Args:
        logprobs: of its tokens, float32 [B, T - 1].
        entropy: of their distributions, [B, T - 1], for a loss that needs it.
        totals: counts of the whole batch; absent: the micro-batch is the batch.
    """

    def placed(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array[:, 1:]).to(logprobs.device, non_blocking=True)

    def placed_if_any(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
        return None if array is None else placed(array)

    old, behaviour = placed_if_any(micro.old_logprobs), placed(micro.rollout_logprobs)
    mask = micro.loss_mask[:, 1:]
    return LossInputs(
        logprobs,
        behaviour if old is None else old,
        placed(micro.advantages),
        placed(micro.loss_mask),
        behaviour,
        Totals(int(mask.sum()), int(mask.any(-1).sum())) if totals is None else totals,
        weights=placed_if_any(micro.weights),
        reference_logprobs=placed_if_any(micro.reference_logprobs),
        entropy=entropy,
        values=placed_if_any(micro.old_values),
    )


def _note(
    token_values: metrics.TokenValues,
    inputs: LossInputs,
    entropy: torch.Tensor,
    micro: MicroBatch,
    algorithm: Algorithm,
    version: int,
) -> None:
    """Add a micro-batch's values for the metrics."""
    exact = "logprobs" in algorithm.needs
    token_values.measure(algorithm.measures(inputs))
    low, high = algorithm.clipped(inputs) or (None, None)
    reference = inputs.reference_logprobs
    token_values.add(
        micro,
        version,
        engine_gaps=inputs.logprobs - inputs.behaviour if exact else None,
        log_ratios=inputs.logprobs - inputs.old_logprobs if exact else None,
        reference_gaps=None if reference is None else inputs.logprobs - reference,
        entropies=entropy,
        low=low,
        high=high,
    )
