"""The metrics of a step, from the values of its tokens, also where it replays recorded routing.
Recorded with the step, and computed again by its replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch

from rollbook.store.events import Json
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.batches.batch import Batch, MicroBatch, without_experts
from rollbook.train.batches.experience import Experience
from rollbook.train.clock import timed
from rollbook.train.ranks.policy import Policy
from rollbook.train.select.routing import FREE
from rollbook.train.step.predictions import logprobs_of


@dataclass(slots=True)
class TokenValues:
    """Values of the trained tokens of all micro-batches, collected as they are computed, one after the other.

    Attributes:
        engine_gaps: logprob less the engine's; log_ratios: less the old one's; reference_gaps: less the
            reference's.
        entropies: in nats; low, high: where a clip is at work; ages: versions since the token was sampled.
        measured: what the algorithm measures of samples or pairs, by name.
    """

    engine_gaps: list[torch.Tensor] = field(default_factory=list)
    log_ratios: list[torch.Tensor] = field(default_factory=list)
    reference_gaps: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    low: list[torch.Tensor] = field(default_factory=list)
    high: list[torch.Tensor] = field(default_factory=list)
    ages: list[torch.Tensor] = field(default_factory=list)
    measured: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def measure(self, values: dict[str, torch.Tensor]) -> None:
        """Add the algorithm's measures of a micro-batch."""
        for name, tensor in values.items():
            self.measured.setdefault(name, []).append(tensor.detach())

    def add(self, micro: MicroBatch, version: int, **values: torch.Tensor | None) -> None:
        """Add the values of a micro-batch's trained tokens, each [B, T - 1]. They stay on their device."""
        mask = micro.loss_mask[:, 1:]
        sampled = torch.from_numpy(micro.versions[:, 1:][mask])
        self.ages.append(torch.where(sampled >= 0, version - sampled, -1))
        places = torch.from_numpy(np.flatnonzero(mask))  # known here, which a device would be waited for
        for name, tensor in values.items():
            if tensor is not None:
                places = places.to(tensor.device, non_blocking=True)  # once: all are on one device
                getattr(self, name).append(tensor.detach().reshape(-1)[places])

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that was collected."""
        for name in _LISTS:
            yield from getattr(self, name)
        for measured in self.measured.values():
            yield from measured

    def of(self, tensors: Iterator[torch.Tensor]) -> TokenValues:
        """The same with others in the place of `tensors`."""
        lists = {name: list(islice(tensors, len(getattr(self, name)))) for name in _LISTS}
        measured = {name: list(islice(tensors, len(held))) for name, held in self.measured.items()}
        return TokenValues(**lists, measured=measured)


_LISTS = tuple(column.name for column in fields(TokenValues) if column.name != "measured")


def all_of(parts: Sequence[TokenValues]) -> TokenValues:
    """The values of several micro-batches, concatenated in order."""
    merged = TokenValues()
    for part in parts:
        for name in _LISTS:
            getattr(merged, name).extend(getattr(part, name))
        for name, tensors in part.measured.items():
            merged.measured.setdefault(name, []).extend(tensors)
    return merged


def of_batch(batch: Batch) -> Json:
    """Metrics of a step's input: rewards, lengths, advantages."""
    experience = batch.experience
    rewards = batch.rewards[np.isfinite(batch.rewards)]
    lengths = np.array([int(mask.sum()) for mask in experience.masks])
    return {
        "trained_tokens": batch.trained_tokens,
        "samples": len(batch.samples),
        "reward": float(sum(rewards.tolist()) / len(rewards)) if len(rewards) else None,
        "reward_std": float(rewards.std()) if len(rewards) else None,
        **_of_trajectories(batch),
        "flat_groups": _flat_groups(batch),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": sum(sample.truncated for sample in batch.samples) / len(batch.samples),
        **_of_weights(experience),
    }


def _of_weights(experience: Experience) -> Json:
    """The mean weight of trained tokens, and the share with weight 0; both count rejected tokens,
    too, which are counted nowhere else. Nothing where tokens have no weights."""
    if experience.weights is None:
        return {}
    left_out = int(experience.left_out.sum())
    count = max(len(experience.weights) + left_out, 1)
    return {
        "weight_mean": float(experience.weights.sum() / count),
        "rejected": (int((experience.weights == 0).sum()) + left_out) / count,
    }


def _of_trajectories(batch: Batch) -> Json:
    """Metrics of rewards, each trajectory counted once, however many of its samples the step trains
    on."""
    each = {s.trajectory_id: r for s, r in zip(batch.samples, batch.rewards.tolist(), strict=True)}
    rewards = np.array([reward for reward in each.values() if np.isfinite(reward)])
    return {
        "trajectories": len(rewards),
        "trajectory_reward": float(rewards.mean()) if len(rewards) else None,
        "trajectory_reward_std": float(rewards.std()) if len(rewards) else None,
    }


def _flat_groups(batch: Batch) -> float | None:
    """Share of the groups of two or more trajectories whose rewards are all equal; None without
    such groups."""
    rewards: dict[str, dict[str, float]] = {}
    for sample, reward in zip(batch.samples, batch.rewards.tolist(), strict=True):
        if sample.group is not None and np.isfinite(reward):
            rewards.setdefault(sample.group, {})[sample.trajectory_id] = reward
    several = [set(group.values()) for group in rewards.values() if len(group) > 1]
    return sum(len(distinct) == 1 for distinct in several) / len(several) if several else None


def of_tokens(values: TokenValues) -> Json:
    """Metrics of the values of the step's tokens.

    `kl` is the mean of k3 of the policy in training to the reference, `old_kl` that to the old
    policy (Schulman 2020). `staleness` is of tokens whose version is known.
    """
    metrics: Json = {}
    ratios = _joined(values.log_ratios).double().clamp(-20, 20)
    if ratios.numel():
        metrics |= {
            "ratio_mean": float(ratios.exp().mean()),
            "ratio_min": float(ratios.exp().min()),
            "ratio_max": float(ratios.exp().max()),
            "old_kl": _k3(ratios),
        }
    if values.low:
        metrics |= {"clipped_low": _share(values.low), "clipped_high": _share(values.high)}
    if values.reference_gaps:
        metrics["kl"] = _k3(_joined(values.reference_gaps).double().clamp(-20, 20))
    if values.entropies:
        metrics["entropy"] = float(_joined(values.entropies).double().mean())
    metrics |= {name: _share(parts) for name, parts in values.measured.items()}
    ages = _joined(values.ages)
    known = ages[ages >= 0].double()
    metrics |= {
        "staleness_mean": float(known.mean()) if known.numel() else None,
        "staleness_max": int(known.max()) if known.numel() else None,
    }
    return metrics | _engine_gaps(values)


def _engine_gaps(values: TokenValues) -> Json:
    """Gaps between the engines' logprobs and the trainer's, separated into staleness and mismatch.

    The log-ratio of a token that version v sampled is log p(now) - log p(engine at v), which is

        [log p(now) - log p(trainer at v)] + [log p(trainer at v) - log p(engine at v)]

    The first is staleness, and exactly zero where v is the version that this step starts from. The second is
    the mismatch of engine and trainer (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; verl's rollout_probs_diff): sums in another order on a healthy engine, and large
    where it serves other weights than it says. So tokens of the step's own version measure it alone.

    Returns:
        `engine_logprob_gap`, `engine_logprob_gap_mean`: greatest and mean absolute log-ratio of the trained
        tokens of this version; `stale_logprob_gap`: the greatest of older ones. Null where there are none.
    """
    if not values.engine_gaps:
        return {}
    gaps, now = _joined(values.engine_gaps).abs(), _joined(values.ages) == 0
    own, older = gaps[now], gaps[~now]
    return {
        "engine_logprob_gap": float(own.max()) if own.numel() else None,
        "engine_logprob_gap_mean": float(own.mean()) if own.numel() else None,
        "stale_logprob_gap": float(older.max()) if older.numel() else None,
    }


def _joined(parts: list[Any]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def _share(parts: list[torch.Tensor]) -> float:
    """The mean of all values."""
    return float(_joined(parts).double().mean())


def _k3(log_ratios: torch.Tensor) -> float:
    """Mean of exp(-d) - 1 + d."""
    return float(((-log_ratios).exp() - 1 + log_ratios).mean())


def of_routing(policy: Policy, algorithm: Algorithm, batch: Batch, version: int) -> Json:
    """Metrics of replayed routing and its effect, before the step; none where routing is not
    replayed.

    Args:
        version: of the policy's weights.

    Returns:
        `routing_replayed`: the share of the positions before each sample's last trained token
        whose experts were
        replayed: all that logprobs of trained tokens depend on. `own_routing_logprob_gap`: what
        `engine_logprob_gap` would be had the routers chosen, by a forward pass without gradients
        over the first
        micro-batch of each data-parallel rank alone; None if none of its trained tokens is of
        this version, and
        absent where engines' logprobs are not asked for.
    """
    if all(micro.experts is None for micro in batch.micro_batches):
        return {}
    counts = np.sum([_replayed(micro) for micro in batch.micro_batches], axis=0)
    metrics: Json = {"routing_replayed": float(counts[0] / max(counts[1], 1))}
    if "logprobs" in algorithm.needs:
        metrics["own_routing_logprob_gap"] = _own_gap(policy, batch, version)
    return metrics


def _replayed(micro: MicroBatch) -> tuple[int, int]:
    """How many of the positions before each sample's last trained token were replayed, and how many
    there are."""
    assert micro.experts is not None
    behind = np.flip(np.logical_or.accumulate(np.flip(micro.loss_mask[:, 1:], 1), axis=1), 1)
    return int((behind & (micro.experts[:, :-1, 0, 0] != FREE)).sum()), int(behind.sum())


def _own_gap(policy: Policy, batch: Batch, version: int) -> float | None:
    """The greatest difference between the engine's logprobs and those of the trainer's own routing."""
    starts = accumulate(batch.shares[:-1], initial=0)
    firsts = [start for start, share in zip(starts, batch.shares, strict=True) if share]
    micro_batches = without_experts([batch.micro_batches[first] for first in firsts])
    with timed("forward"):
        logprobs = policy.forward(micro_batches, logprobs_of, [min(share, 1) for share in batch.shares])
    gaps = []
    for micro, own in zip(micro_batches, logprobs, strict=True):
        counted = micro.loss_mask[:, 1:] & (micro.versions[:, 1:] == version)
        engine = torch.from_numpy(micro.rollout_logprobs[:, 1:])
        gaps.append((own.cpu() - engine)[torch.from_numpy(counted)].abs())
    every = torch.cat(gaps)
    return float(every.max()) if every.numel() else None
