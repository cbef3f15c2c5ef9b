"""Which samples of a step contribute most to a metric: what it would be without each of them.

Each sample is passed through the model by itself, its loss normalized as in the whole batch, so
that the samples' gradients and losses add up to the step's, but for the order of sums. The norm
without a sample follows from two passes over all of them: |G - g|^2 = |G|^2 - 2 <G, g> + |g|^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from rollbook.replay.step.replayer import Replayer
from rollbook.replay.step.run_log import RunLog
from rollbook.replay.step.starts import find_start
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.fold.history import History
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch, build_batch
from rollbook.train.ranks.policy import Policy
from rollbook.train.step import metrics
from rollbook.train.step.step import MicroLoss, PolicyLoss

GRADIENT_NORM = "gradient_norm"
LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a sample contributes.

    Attributes:
        sample: its place in the manifest.
        without: the metric of the step without it; None where there is none then.
        change: `without` less the metric of the whole step; 0 where either is missing.
        tokens: how many of it are trained.
    """

    sample: int
    trajectory_id: str
    trajectory: str
    turn_id: str
    group: str | None
    reward: float
    tokens: int
    without: float | None
    change: float


@dataclass(frozen=True, slots=True)
class Contributions:
    """A step's metric as these passes give it, and the samples, those first that change it most."""

    step: int
    metric: str
    value: float | None
    samples: list[Contribution]


def contributions(
    log: Store,
    history: History,
    step: int,
    metric: str,
    *,
    trust_parts: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> Contributions:
    """What a metric of a step would be without each of its samples.

    Args:
        metric: `gradient_norm`, `loss`, or one that is made of trained tokens, such as `kl` or `ratio_max`.
        done: told of samples as they are passed through the model; twice each for the gradients.

    Raises:
        ReplayError: the step cannot be replayed, or the metric is not one of these.
    """
    target = history.steps[step]
    of_run = RunLog(log, history)
    start = find_start(of_run, target)
    with Replayer(of_run, start, trust_parts=trust_parts, one_rank=True) as replayer:
        for between in start.between:
            replayer.run(between, claims=False)
        policy, batch = replayer.before(target)
        algorithm = recorded_algorithm(target.planned.algorithm)
        totals = Totals(batch.trained_tokens, batch.trained_samples)
        passes = _Samples(policy, batch, PolicyLoss(algorithm, target.planned.policy_version, totals), done)
        whole, without = passes.gradient_norms() if metric == GRADIENT_NORM else passes.values(metric)
    samples = [_contribution(batch, at, whole, value) for at, value in enumerate(without)]
    samples.sort(key=lambda sample: (-abs(sample.change), sample.sample))
    return Contributions(step, metric, whole, samples)


def _contribution(batch: Batch, at: int, whole: float | None, without: float | None) -> Contribution:
    sample = batch.samples[at]
    change = 0.0 if whole is None or without is None else without - whole
    return Contribution(
        at,
        sample.trajectory_id,
        sample.name,
        sample.leaf_turn_id,
        sample.group,
        float(batch.rewards[at]),
        int(batch.experience.masks[at].sum()),
        without,
        change,
    )


@dataclass(slots=True, eq=False)
class _Samples:
    """The samples of a batch, each in passes of its own."""

    policy: Policy
    batch: Batch
    loss_of: PolicyLoss
    done: Callable[[int], None]

    def _each(self) -> Iterator[MicroLoss]:
        """What is kept of each sample's loss; until the next one, the policy has its gradients."""
        packed = any(micro.lengths is not None for micro in self.batch.micro_batches)
        mixture = self.policy.shape.mixture
        replays = any(micro.experts is not None for micro in self.batch.micro_batches)
        for at in range(len(self.batch.samples)):
            alone = self.batch.experience.part([at])
            single = build_batch(alone, [[[0]]], packed=packed, mixture=mixture if replays else None)
            (loss,) = self.policy.forward_backward(single.micro_batches, self.loss_of, single.shares)
            yield loss
            self.done(1)

    def gradient_norms(self) -> tuple[float, list[float]]:
        """The norm of the step's gradients, and what it is without each sample."""
        total: dict[str, torch.Tensor] = {}
        own: list[float] = []
        for _ in self._each():
            square = 0.0
            for name, gradient in self.policy.stream_gradients():
                wide = gradient.double()
                square += float((wide * wide).sum())
                total[name] = total[name] + wide if name in total else wide.clone()
            own.append(square)
        whole = sum(float((g * g).sum()) for g in total.values())
        norms: list[float] = []
        for square, _ in zip(own, self._each(), strict=True):
            shared = sum(
                float((total[name] * gradient.double()).sum())
                for name, gradient in self.policy.stream_gradients()
            )
            norms.append(sqrt(max(whole - 2 * shared + square, 0.0)))
        return sqrt(whole), norms

    def values(self, metric: str) -> tuple[float | None, list[float | None]]:
        """A metric of the step's tokens, or the loss, and what it is without each sample.

        Raises:
            ReplayError: it is none of these.
        """
        losses = list(self._each())
        if metric == LOSS:
            parts = [float(loss.total) / self.loss_of.divisor for loss in losses]
            return sum(parts), [sum(parts) - part for part in parts]
        whole = _of_tokens(losses)
        if metric not in whole:
            there = ", ".join([GRADIENT_NORM, LOSS, *sorted(whole)])
            raise ReplayError(f"metric {metric!r} is not made of single samples' passes: take one of {there}")
        without = [_of_tokens(losses[:at] + losses[at + 1 :]).get(metric) for at in range(len(losses))]
        return whole[metric], without


def _of_tokens(losses: Sequence[MicroLoss]) -> dict[str, Any]:
    return metrics.of_tokens(metrics.all_of([loss.seen for loss in losses]))
