"""One optimizer step: the same code for training and for its replay.

A step is a function of its manifest, the samples the manifest names, and the policy's state. Its
result is a digest per stage, in the order in which the stages depend on each other.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

from rollbook.ingest.engines.weights.digests import digest_tensors
from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.algorithm import Algorithm, LossInputs
from rollbook.train.algorithms.logprobs import token_logprobs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.data.batch import Batch, MicroBatch, build_batch
from rollbook.train.data.samples import Sample
from rollbook.train.loop.finite import check_batch, check_tensors, check_tokens
from rollbook.train.megatron.backend import TrainablePolicy

STAGES = (
    "input_weights",
    "input_optimizer",
    "rng",
    "samples",
    "rewards",
    "advantages",
    "old_logprobs",
    "logprobs",
    "losses",
    "gradients",
    "optimizer",
    "weights",
)
"""Every stage of a step, each after those it depends on, so that the first one that differs is the cause."""


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
    """Seed the generators and digest what the step starts from: the stages in `INPUT_STAGES`."""
    policy.seed_step(seed)
    return {
        "input_weights": policy.weights_digest(),
        "input_optimizer": policy.optimizer_digest(),
        "rng": rng_digest(),
    }


def batch_of(plan: StepPlanned, samples: dict[str, Sample]) -> Batch:
    """The batch a manifest describes.

    Args:
        samples: by leaf turn; those the manifest names must be there.
    """
    ordered = [samples[ref["turn_id"]] for ref in plan.samples]
    algorithm = recorded_algorithm(plan.algorithm)
    return build_batch(ordered, algorithm, plan.partition)


def run_step(policy: TrainablePolicy, plan: StepPlanned, batch: Batch, *, finite: bool = True) -> StepResult:
    """Forward, backward, optimizer. The generators were seeded by `input_digests`.

    Args:
        finite: end before the optimizer's step where a number is not finite. Steps that were committed with
            such numbers, by an earlier Rollbook, are run again without it.

    Raises:
        NotFiniteError: it names the stage, and the sample or tensor, in which it began.
    """
    algorithm = recorded_algorithm(plan.algorithm)
    divisor = max(algorithm.divisor(Totals(batch.trained_tokens, len(batch.samples))), 1)
    kept: dict[str, list[torch.Tensor]] = {"logprobs": [], "losses": [], "ratios": [], "sums": []}

    def loss_of(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        loss, logprobs, ratios = _micro_loss(logits, micro, algorithm)
        total = algorithm.add(loss, torch.from_numpy(micro.loss_mask[:, 1:]).to(loss.device))
        for name, value in zip(kept, (logprobs, loss, ratios, total), strict=True):
            kept[name].append(value.detach())
        return total / divisor

    if finite:
        check_batch(batch)
    policy.forward_backward(batch.micro_batches, loss_of)
    if finite:
        for stage in ("logprobs", "losses"):
            check_tokens(stage, kept[stage], batch, plan.partition)
        check_tensors("gradients", policy.gradients().items())
    gradients = digest_tensors(policy.gradients())
    norm = policy.optimizer_step(plan.learning_rate)
    if finite:
        check_tensors("weights", policy.stream_weights())
    digests = batch.digests() | {
        "logprobs": digest_tensors({str(i): t for i, t in enumerate(kept["logprobs"])}),
        "losses": digest_tensors({str(i): t for i, t in enumerate(kept["losses"])}),
        "gradients": gradients,
        "optimizer": policy.optimizer_digest(),
        "weights": policy.weights_digest(),
    }
    metrics = {"loss": float(sum(kept["sums"])) / divisor} | _metrics(batch, norm)
    if "logprobs" in algorithm.needs:
        metrics |= logprob_gaps(batch, kept["ratios"], plan.policy_version)
    return StepResult(digests, metrics)


def _micro_loss(
    logits: torch.Tensor, micro: MicroBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(masked losses, masked logprobs, masked log-ratios to the engine), each [B, T - 1]."""
    device = logits.device
    tokens = torch.from_numpy(micro.tokens).to(device)
    mask = torch.from_numpy(micro.loss_mask[:, 1:]).to(device)
    temperatures = torch.from_numpy(micro.temperatures).to(device)
    logprobs = token_logprobs(logits, tokens, temperatures)
    old = torch.from_numpy(micro.old_logprobs[:, 1:]).to(device)
    advantages = torch.from_numpy(micro.advantages[:, 1:]).to(device)
    loss = algorithm.loss(LossInputs(logprobs, old, advantages, mask))
    ratios = torch.where(mask, logprobs - old, 0.0)
    return torch.where(mask, loss, 0.0), torch.where(mask, logprobs, 0.0), ratios


def _metrics(batch: Batch, norm: float) -> Json:
    rewards = [float(r) for r in batch.rewards if np.isfinite(r)]
    return {
        "gradient_norm": norm,
        "trained_tokens": batch.trained_tokens,
        "samples": len(batch.samples),
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }


def logprob_gaps(batch: Batch, log_ratios: list[torch.Tensor], version: int) -> Json:
    """Gaps between the engines' logprobs and the trainer's, separated into staleness and mismatch.

    The log-ratio of a token that version v sampled is log p(now) - log p(engine at v), which is

        [log p(now) - log p(trainer at v)] + [log p(trainer at v) - log p(engine at v)]

    The first is staleness, and exactly zero where v is the version that this step starts from. The second is
    the mismatch of engine and trainer (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; verl's rollout_probs_diff): sums in another order on a healthy engine, and large
    where it serves other weights than it says. So tokens of the step's own version measure it alone.

    Args:
        log_ratios: of each micro-batch, [B, T - 1].
        version: the policy version that the step starts from.

    Returns:
        `engine_logprob_gap`, `engine_logprob_gap_mean`: greatest and mean absolute log-ratio of the trained
        tokens of this version; `stale_logprob_gap`: the greatest of older ones. Null where there are none.
    """
    fresh, stale = [torch.empty(0)], [torch.empty(0)]
    for micro, ratios in zip(batch.micro_batches, log_ratios, strict=True):
        gaps, mask = ratios.abs().cpu(), torch.from_numpy(micro.loss_mask[:, 1:])
        now = torch.from_numpy(micro.versions[:, 1:] == version)
        fresh.append(gaps[mask & now])
        stale.append(gaps[mask & ~now])
    own, older = torch.cat(fresh), torch.cat(stale)
    return {
        "engine_logprob_gap": float(own.max()) if own.numel() else None,
        "engine_logprob_gap_mean": float(own.mean()) if own.numel() else None,
        "stale_logprob_gap": float(older.max()) if older.numel() else None,
    }
