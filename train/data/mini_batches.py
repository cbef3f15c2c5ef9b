"""Mini-batches: the parts of a rollout batch that its optimizer steps take. Pure."""

from __future__ import annotations

import numpy as np

from rollbook.train.algorithms.algorithm import Demand


def mini_batches(count: int, demand: Demand, seed: int) -> list[list[int]]:
    """Positions of the samples of each step on a rollout batch of `count` samples, in order.

    Each epoch is a permutation of all samples, decided by the seed and its number, in `demand.mini_batches`
    parts whose sizes differ by at most one; parts without a sample are left out. A single step takes all, in
    their order.
    """
    if demand.steps == 1:
        return [list(range(count))]
    parts: list[list[int]] = []
    for epoch in range(demand.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(count)
        parts += [part.tolist() for part in np.array_split(order, demand.mini_batches) if len(part)]
    return parts
