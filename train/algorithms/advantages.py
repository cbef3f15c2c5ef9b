"""Advantages from rewards. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollbook.train.algorithms.rollouts import Floats


def group_advantages(rewards_G: Floats, std_epsilon: float) -> Floats:
    """Group-relative advantages, (r - mean) / (std + epsilon), of one group's G trajectories.

    The standard deviation is the unbiased one; a group of one has advantage 0. Source: GRPO, Shao et
    al. 2024 (arXiv:2402.03300), outcome supervision.
    """
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + std_epsilon)


def trajectory_advantages(
    rewards_N: Floats, groups_N: Sequence[str], trajectories_N: Sequence[str], std_epsilon: float
) -> Floats:
    """Advantage of each of N samples within its group.

    A trajectory counts once in its group, however many samples it was split into; all of its samples
    get its advantage.
    """
    members: dict[str, dict[str, int]] = {}
    for i, (group, trajectory) in enumerate(zip(groups_N, trajectories_N, strict=True)):
        members.setdefault(group, {})[trajectory] = i
    found: dict[tuple[str, str], float] = {}
    for group, of_group in members.items():
        advantages_G = group_advantages(rewards_N[list(of_group.values())], std_epsilon)
        found |= zip(((group, t) for t in of_group), advantages_G, strict=True)
    pairs = zip(groups_N, trajectories_N, strict=True)
    return np.fromiter((found[pair] for pair in pairs), np.float64, len(rewards_N))
