"""Returns and advantages where a turn, not a token, takes a step of discount; and sums of trajectories. Pure
numpy.

A turn is what a policy sampled in answer to one request. Its tokens are discounted alike: the reward of the
next turn counts `discount` times at each of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollbook.train.algorithms.baselines import grouped
from rollbook.train.algorithms.rollouts import Floats, Rollouts

Bools = npt.NDArray[np.bool_]


def turn_returns(rewards: Floats, of: Rollouts, discount: float) -> Floats:
    """G_t = r_t + c_t G_{t+1} within each sample, [P]; c_t is 1 within a turn, and `discount` at its end.

    Source: Sutton and Barto 2018, equation 3.8, with a turn as the step, as an agent's environment has it.
    """
    places = _places(of)
    found, steps = _rows(rewards, places), _rows(_steps(of, discount), places)
    for column in range(found.shape[1] - 2, -1, -1):
        found[:, column] += steps[:, column] * found[:, column + 1]
    return found[places]


def turn_advantages(rewards: Floats, values: Floats, of: Rollouts, discount: float, decay: float) -> Floats:
    """Advantages by GAE, [P]: A_t = d_t + c_t * decay * A_{t+1}, d_t = r_t + c_t V_{t+1} - V_t.

    Source: Schulman et al. 2016 (arXiv:1506.02438), equation 16.
    """
    places = _places(of)
    value, steps = _rows(values, places), _rows(_steps(of, discount), places)
    delta = _rows(rewards, places) - value
    delta[:, :-1] += steps[:, :-1] * value[:, 1:]
    for column in range(delta.shape[1] - 2, -1, -1):
        delta[:, column] += steps[:, column] * decay * delta[:, column + 1]
    return delta[places]


def of_trajectories(values: Floats, of: Rollouts) -> Floats:
    """Of each sample the sum over all tokens of its trajectory, [N] of [P]."""
    lengths = np.asarray(of.lengths)
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, len(lengths))
    members = grouped(np.zeros(len(lengths)), of.groups, of.trajectories).of_sample
    found: Floats = np.bincount(members, sums)[members].astype(np.float64)
    return found


def _steps(of: Rollouts, discount: float) -> Floats:
    """What the token after each counts at it, [P]: 1 within a turn, the discount at a turn's end, and 0 at a
    sample's."""
    assert of.turns is not None
    steps = np.ones(len(of.turns))
    steps[:-1][of.turns[1:] != of.turns[:-1]] = discount
    steps[of.last] = 0.0
    return steps


def _places(of: Rollouts) -> Bools:
    """Where tokens are in an array [N, longest], row by row; rows begin at the first column."""
    lengths = np.asarray(of.lengths)
    places: Bools = np.arange(max(int(lengths.max(initial=0)), 1)) < lengths[:, None]
    return places


def _rows(values: Floats, places: Bools) -> Floats:
    """Values [P] as [N, longest], with zeros after shorter samples."""
    rows = np.zeros(places.shape)
    rows[places] = values
    return rows
