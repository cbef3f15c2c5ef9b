"""What an algorithm carries from step to step: a KL coefficient that follows a target, and the moments of all
rewards so far. Pure.

Both are keys of the algorithm, so the manifest of each step holds the values that it used, and the next ones
follow from it and from the step's metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbook.store.events import Json
from rollbook.train.algorithms.rollouts import Floats

LARGEST_ERROR = 0.2
"""The relative error of the KL divergence counts up to this much in a step."""
EPSILON = 1e-8
"""Added to the standard deviation of rewards."""


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The coefficient after a step of so many samples: raised where the divergence is above its target.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2. verl and OpenRLHF have it.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * samples / horizon)


@dataclass(frozen=True, slots=True)
class Moments:
    """Of `count` numbers the mean and the variance, over n."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @staticmethod
    def of(values: Floats) -> Moments:
        """Of an array."""
        return Moments(len(values), float(values.mean()), float(values.var())) if len(values) else Moments()

    def with_more(self, other: Moments) -> Moments:
        """Of both together. Source: Chan, Golub and LeVeque 1979, equation 2.1."""
        count = self.count + other.count
        if not count:
            return self
        delta, share = other.mean - self.mean, other.count / count
        spread = self.variance * self.count + other.variance * other.count
        spread += delta**2 * self.count * share
        return Moments(count, self.mean + delta * share, spread / count)

    def normalized(self, values: Floats) -> Floats:
        """The values less the mean, divided by the standard deviation."""
        return np.asarray((values - self.mean) / (np.sqrt(self.variance) + EPSILON))


def moments_of(metrics: Json, what: str) -> Moments | None:
    """Of a step's rewards, by its metrics; None where it had none.

    Args:
        what: `trajectories`, each counted once, or `samples`.
    """
    names = {
        "trajectories": ("trajectories", "trajectory_reward", "trajectory_reward_std"),
        "samples": ("samples", "reward", "reward_std"),
    }
    count, mean, deviation = (metrics.get(name) for name in names[what])
    if count is None or mean is None or deviation is None:
        return None
    return Moments(int(count), mean, deviation**2)
