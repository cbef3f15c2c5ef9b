"""One side of the benchmark of bits, in a process of its own: the numbers of a training's first step.

    python -m rollbook.bench.bits_side MODEL FILE

Takes the step in the way that each line of standard input says, and answers with a line once FILE holds them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from rollbook.bench.train_sides import samples
from rollbook.train.select.samples import Sample

if TYPE_CHECKING:
    import torch

LR = 1e-3
SAMPLES, GROUP, LONGEST = 8, 4, 128
"""Samples, those that answer the same, and tokens of the longest."""
ALGORITHM = {"name": "grpo", "groups": SAMPLES // GROUP, "group_size": GROUP}

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Way:
    """How a side computes: the type of weights, torch's threads, samples of a micro-batch."""

    dtype: str = "float32"
    threads: int = 1
    rows: int = 4


def rollouts() -> list[Sample]:
    """Samples in groups, with rewards, and logprobs near those of a new model."""
    rng = np.random.default_rng(1)
    rewarded = []
    for i, sample in enumerate(samples()[:SAMPLES]):
        short = sample.within(LONGEST)
        logprobs = np.where(short.loss_mask, rng.normal(-9, 0.1, len(short)), 0).astype(np.float32)
        group, reward = f"g{i // GROUP}", float(rng.integers(0, 2))
        rewarded.append(replace(short, group=group, reward=reward, logprobs=logprobs))
    return rewarded


def first_step(model: Path, way: Way) -> Arrays:
    """`stage/name` -> array, of a model's first step.

    Per-token numbers are those of each sample's trained tokens, however they are cut into
    micro-batches.
    """
    import torch

    from rollbook.engines.weights.digests import read_weights
    from rollbook.train.algorithms.normalizers import Totals
    from rollbook.train.algorithms.registry import recorded_algorithm
    from rollbook.train.batches.batch import build_batch, partition, token_values
    from rollbook.train.batches.experience import experience_of
    from rollbook.train.config.config import OptimizerConfig
    from rollbook.train.model.model import Build
    from rollbook.train.model.shape import read_shape
    from rollbook.train.ranks.backend import TrainablePolicy
    from rollbook.train.step.step import PolicyLoss

    how = Build(1000, torch.device("cpu"), 0, way.threads, way.dtype)
    policy = TrainablePolicy(read_shape(model), OptimizerConfig(lr=LR), how)
    policy.load_weights(read_weights(model))
    batch_samples, algorithm = rollouts(), recorded_algorithm(ALGORITHM)
    batch = build_batch(experience_of(batch_samples, algorithm), partition(len(batch_samples), way.rows))
    loss_of = PolicyLoss(algorithm, 0, Totals(batch.trained_tokens, batch.trained_samples))
    policy.seed_step(0)
    results = policy.forward_backward(batch.micro_batches, loss_of, batch.shares)
    pairs = list(zip(batch.micro_batches, results, strict=True))
    logprobs = [row for micro, result in pairs for row in token_values(micro, result.values.numpy())]
    losses = [row for micro, result in pairs for row in token_values(micro, result.losses.numpy())]
    gradients = _arrays(policy.gradients())
    norm, loss = policy.optimizer_step(LR), sum(float(result.total) for result in results) / loss_of.divisor
    return (
        _named("advantages", {"": np.asarray(batch.experience.advantages.values)})
        | _named("logprobs", dict(enumerate(logprobs)))
        | _named("losses", dict(enumerate(losses)))
        | _named("gradients", gradients)
        | _named("optimizer", _arrays(policy.optimizer_state()))
        | _named("weights", _arrays(policy.weights()))
        | _named("metrics", {"loss": np.array(loss), "gradient_norm": np.array(norm)})
    )


def _named(stage: str, arrays: dict[Any, npt.NDArray[Any]]) -> Arrays:
    return {f"{stage}/{name}": array for name, array in arrays.items()}


def _arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """As numpy, which has no bfloat16: float32 has every number of it."""
    return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}


def main() -> None:
    """Take steps until standard input ends."""
    model, file = sys.argv[1:]
    for line in sys.stdin:
        arrays: dict[str, Any] = first_step(Path(model), Way(**orjson.loads(line)))
        np.savez(file, **arrays)
        sys.stdout.buffer.write(orjson.dumps({}) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
