"""Shaping: what becomes of trajectories' rewards before they are compared. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollbook.train.algorithms.rollouts import Floats, Ints


def overlong_penalty(lengths: Ints, longest: int, buffer: int) -> Floats:
    """From 0 to -1 over the last `buffer` tokens before `longest`, and -1 beyond, [M].

    Source: soft overlong punishment of DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13.

    Args:
        lengths: trained tokens of each trajectory.
    """
    return -((lengths - (longest - buffer)) / buffer).clip(0, 1)


def stopped_properly(rewards: Floats, truncated: npt.NDArray[np.bool_], coefficient: float) -> Floats:
    """Rewards of truncated trajectories times a coefficient; one below 0 takes their place, [M].

    Source: the stop-properly penalty of ProRL, Liu et al. 2025 (arXiv:2505.24864), as in OpenRLHF and NeMo
        RL.
    """
    return np.where(truncated, coefficient if coefficient < 0 else rewards * coefficient, rewards)
