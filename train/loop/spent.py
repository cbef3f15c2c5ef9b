"""What the steps of a training take of time and memory, as their metrics say it."""

from __future__ import annotations

import resource
import time

import torch

from rollbook.store.events import Json
from rollbook.train.clock import Clock


class Spent:
    """Counts what lies between steps: checkpoints and syncs, and the wait for a batch."""

    def __init__(self) -> None:
        self._free = time.perf_counter()
        """When the trainer was done with the last batch."""
        self._waited = self._scored = self._published = 0.0
        """Seconds that no step has said yet."""

    def batch_came(self) -> None:
        """The trainer has a batch in hand."""
        self._waited = time.perf_counter() - self._free - self._scored

    def scored(self, begun: float) -> None:
        """A part of the batch to come is scored, which began at this time of the clock."""
        self._scored += time.perf_counter() - begun

    def published(self, begun: float) -> None:
        """The last version's checkpoint and sync are done, which began at this time of the clock."""
        self._free = time.perf_counter()
        self._published = self._free - begun

    def metrics(self, counted: Clock) -> Json:
        """Seconds by part, and memory: of a step, and of what came before it."""
        parts = {"publish": self._published, "wait": self._waited, "scoring": 0.0} | counted.now()
        parts["scoring"] += self._scored
        self._published = self._waited = self._scored = 0.0
        return {f"{part}_s": seconds for part, seconds in parts.items()} | {"memory_gib": _peak_gib()}


def is_spent(metric: str) -> bool:
    """Whether a metric is of time or memory, which no replay computes again."""
    return metric.endswith(("_s", "_gib"))


def _peak_gib() -> float:
    """The most memory of the GPU, where there is one, or of this process, so far."""
    if torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
