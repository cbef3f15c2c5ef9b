"""The trainer's own loop, beside which the service stands: `service_loop MODEL RANK THREADS`, a process.

The same base model, low-rank factors, tokens and loss, by the code of `rollbook train`: packed micro-batches,
`TrainablePolicy`, AdamW. Answers each line of standard input with a line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.bench.processes import obey
from rollbook.bench.service_stage import LEARNING_RATE, MOST_TOKENS, TARGETS, Rows
from rollbook.engines.weights.digests import read_weights
from rollbook.train.algorithms.sft import Sft
from rollbook.train.batches.batch import Batch, MicroBatch, build_batch, packed_partition
from rollbook.train.batches.experience import experience_of
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import LoraConfig
from rollbook.train.model.lora import fresh_factors
from rollbook.train.model.model import Build, choose_device
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import AdamSettings, TrainablePolicy
from rollbook.train.select.samples import Sample
from rollbook.train.step.predictions import Predictions

ADAM = AdamSettings(LEARNING_RATE, (0.9, 0.95), 1e-12, 0.0, 0.0)
"""As a client has it that says no more than the learning rate."""


class Loop:
    """A policy in training, without a log."""

    def __init__(self, model: Path, rank: int, threads: int) -> None:
        shape, lora = read_shape(model), LoraConfig(rank=rank, targets=TARGETS)
        how = Build(1, choose_device("cpu"), 0, threads, lora=lora)
        self._policy = TrainablePolicy(shape, OptimizerConfig(), how)
        self._policy.load_weights(read_weights(model))
        self._policy.load_adapter(fresh_factors(shape, lora, 0))

    def train(self, rows: Rows, steps: int) -> Any:
        """Optimizer steps, each behind a pass over all rows; seconds, and the losses."""
        begun = time.perf_counter()
        losses = [self._pass_and_step(rows)[0] for _ in range(steps)]
        return {"seconds": time.perf_counter() - begun, "losses": losses}

    def operate(self, rows: Rows, count: int) -> Any:
        """Seconds of so many passes, each with the step behind it."""
        return [self._pass_and_step(rows)[1:] for _ in range(count)]

    def _pass_and_step(self, rows: Rows) -> tuple[float, float, float]:
        begun = time.perf_counter()
        sums = self._policy.forward_backward(self._batch(rows).micro_batches, _loss)
        passed = time.perf_counter()
        self._policy.adam_step(ADAM)
        return float(sum(sums)), passed - begun, time.perf_counter() - passed

    def _batch(self, rows: Rows) -> Batch:
        dataset = [_sample(f"t{at}", row) for at, row in enumerate(rows)]
        parts = packed_partition(dataset, MOST_TOKENS, self._policy.shape.work, 1)
        experience = experience_of(dataset, Sft(name="sft", batch_size=len(dataset)))
        return build_batch(experience, parts, packed=True)


def _sample(name: str, row: Sequence[int]) -> Sample:
    tokens = np.asarray(row, np.int32)
    mask = np.arange(len(row)) > 0
    zeros, ones, versions = (
        np.zeros(len(row), np.float32),
        np.ones(len(row), np.float32),
        np.where(mask, 0, -1),
    )
    named = "bench", name, name, name, (name,), (len(row),), None, "train"
    return Sample(*named, tokens, mask, zeros, versions, ones, 0.0, {})


def _loss(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    loss = -Predictions(logits, micro).logprobs().sum()
    return loss, loss.detach()


def main() -> None:
    """Do what is asked until standard input ends."""
    model, rank, threads = Path(sys.argv[1]), *map(int, sys.argv[2:])
    loop = Loop(model, rank, threads)
    deeds: dict[str, Callable[..., Any]] = {"train": loop.train, "operate": loop.operate}

    def do(asked: dict[str, Any]) -> Any:
        return {"came": deeds[asked.pop("do")](**asked)}

    obey(do)


if __name__ == "__main__":
    main()
