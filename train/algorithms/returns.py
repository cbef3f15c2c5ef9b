"""Returns and advantages of tokens, from the rewards of tokens, discounted by token or by turn.
Pure numpy.

Tokens of samples lie one after the other, [P]; `lengths` [N] is the number of tokens of each
sample. Only trained tokens count: the text of a tool or a user in between takes no step of
discount, as in verl. A turn is what a policy sampled in answer to one request. Its tokens are
discounted alike: the reward of the next turn counts `discount` times at each of them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollbook.train.algorithms.advantages import grouped
from rollbook.train.algorithms.rollouts import Floats, Ints, Rollouts

Bools = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)
_AT_ONCE = 1 << 15
"""Tokens that are computed together: they stay in a core's cache."""


def discounted_returns(rewards: Floats, lengths: Ints, discount: float) -> Floats:
    """G_t = r_t + discount * G_{t+1} within each sample, [P].

    Source: Sutton and Barto 2018, equation 3.8; REINFORCE++ of Hu 2025 (arXiv:2501.03262) takes it with the
        KL
    penalty among the rewards.
    """
    places = _places(lengths)
    padded = _padded(rewards, places)
    for column in range(padded.shape[1] - 2, -1, -1):
        padded[:, column] += discount * padded[:, column + 1]
    return padded[places]


def whole_returns(values: Floats, lengths: Ints) -> Floats:
    """The undiscounted return of each token where a sample's value [N] is the reward of its last
    token, [P]: the value itself. It has the same bits as `discounted_returns` of
    `at_last_tokens`."""
    least = np.iinfo(np.int64).min
    if values.view(np.int64).min(initial=0) == least:  # -0.0, which is 0.0 once another token's 0 is added
        return discounted_returns(at_last_tokens(values, lengths), lengths, 1.0)
    return of_tokens(values, lengths)


def generalized_advantages(
    rewards: Floats, values: Floats, lengths: Ints, discount: float, decay: float
) -> Floats:
    """Advantages by GAE, [P]: A_t = d_t + discount * decay * A_{t+1}, d_t = r_t + discount * V_{t+1} - V_t.

    The value after the last token is 0. A_t + V_t is the critic's target. Source: Schulman et al. 2016
    (arXiv:1506.02438), equation 16.
    """
    places = _places(lengths)
    value = _padded(values, places)
    delta = _padded(rewards, places) - value
    delta[:, :-1] += discount * value[:, 1:]
    for column in range(delta.shape[1] - 2, -1, -1):
        delta[:, column] += discount * decay * delta[:, column + 1]
    return delta[places]


def whitened(values: Floats, ddof: int, *, epsilon: float = 1e-8, out: Floats | None = None) -> Floats:
    """(values - mean) / sqrt(variance + epsilon), [P].

    A single value has variance 0. Its sources differ in the variance: verl's `masked_whiten` has the unbiased
    one (`ddof` 1), OpenRLHF the biased one (0); both have this epsilon.

    Args:
        out: float64 [P], where they are written, which may be the values themselves; None: a new array.
    """
    scaled = np.empty_like(values) if out is None else out
    if not len(values):
        return scaled
    mean = values.mean()
    scale = np.sqrt(_squares(values, mean) / max(len(values) - ddof, 1) + epsilon)
    for at in range(0, len(values), _AT_ONCE):
        piece = np.subtract(values[at : at + _AT_ONCE], mean, out=scaled[at : at + _AT_ONCE])
        piece /= scale
    return scaled


def _squares(values: Floats, mean: np.float64) -> np.float64:
    """The sum of the squared distances from the mean, with the bits of `((values - mean) **
    2).sum()`: numpy sums halves separately, the first a multiple of eight long, down to pieces
    shorter than these."""
    if len(values) > _AT_ONCE:
        half = len(values) // 2
        half -= half % 8
        return _squares(values[:half], mean) + _squares(values[half:], mean)
    distances = values - mean
    distances *= distances
    return np.float64(distances.sum())


def of_tokens(values: npt.NDArray[_T], lengths: Ints) -> npt.NDArray[_T]:
    """The value of each sample [N], repeated for each of its tokens, [P]."""
    return np.repeat(values, lengths)


def at_last_tokens(values: Floats, lengths: Ints) -> Floats:
    """A value of each sample [N] at its last token, 0 at the others, [P]."""
    placed = np.zeros(int(lengths.sum()))
    has = lengths > 0
    placed[(np.cumsum(lengths) - 1)[has]] = values[has]
    return placed


def from_last_tokens(values: Floats, lengths: Ints) -> Floats:
    """The value at each sample's last token [N], from values of tokens [P]; 0 for a sample without
    a token."""
    last = np.zeros(len(lengths))
    has = lengths > 0
    last[has] = values[(np.cumsum(lengths) - 1)[has]]
    return last


def _places(lengths: Ints) -> Bools:
    """A mask of where the tokens are in an array [N, longest], row by row; rows are right-aligned."""
    longest = max(int(lengths.max(initial=0)), 1)
    places: Bools = np.arange(longest) >= (longest - lengths)[:, None]
    return places


def _padded(values: Floats, places: Bools) -> Floats:
    """Values [P] as [N, longest]; shorter samples are padded with zeros in front, so that all end
    together."""
    padded = np.zeros(places.shape)
    padded[places] = values
    return padded


def turn_returns(rewards: Floats, rollouts: Rollouts, discount: float) -> Floats:
    """G_t = r_t + c_t G_{t+1} within each sample, [P]; c_t is 1 within a turn, and `discount` at its end.

    Source: Sutton and Barto 2018, equation 3.8, with a turn as the step, as an agent's environment has it.
    """
    places = _turn_places(rollouts)
    returns, steps = _padded(rewards, places), _padded(_steps(rollouts, discount), places)
    for column in range(returns.shape[1] - 2, -1, -1):
        returns[:, column] += steps[:, column] * returns[:, column + 1]
    return returns[places]


def turn_advantages(
    rewards: Floats, values: Floats, rollouts: Rollouts, discount: float, decay: float
) -> Floats:
    """Advantages by GAE, [P]: A_t = d_t + c_t * decay * A_{t+1}, d_t = r_t + c_t V_{t+1} - V_t.

    Source: Schulman et al. 2016 (arXiv:1506.02438), equation 16.
    """
    places = _turn_places(rollouts)
    value, steps = _padded(values, places), _padded(_steps(rollouts, discount), places)
    delta = _padded(rewards, places) - value
    delta[:, :-1] += steps[:, :-1] * value[:, 1:]
    for column in range(delta.shape[1] - 2, -1, -1):
        delta[:, column] += steps[:, column] * decay * delta[:, column + 1]
    return delta[places]


def of_trajectories(values: Floats, rollouts: Rollouts) -> Floats:
    """For each sample, the sum over all tokens of its trajectory, [N] of [P]."""
    lengths = np.asarray(rollouts.lengths)
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, len(lengths))
    members = grouped(np.zeros(len(lengths)), rollouts.groups, rollouts.trajectories).of_sample
    totals: Floats = np.bincount(members, sums)[members].astype(np.float64)
    return totals


def _steps(rollouts: Rollouts, discount: float) -> Floats:
    """The factor by which what follows a token counts at it, [P]: 1 within a turn, the discount at
    a turn's end, and 0 at a sample's end."""
    turns = rollouts.turns
    assert turns is not None
    steps = np.ones(len(turns))
    steps[:-1][turns[1:] != turns[:-1]] = discount
    steps[rollouts.last] = 0.0
    return steps


def _turn_places(rollouts: Rollouts) -> Bools:
    """A mask of where the tokens are in an array [N, longest], row by row; rows are left-aligned."""
    lengths = np.asarray(rollouts.lengths)
    places: Bools = np.arange(max(int(lengths.max(initial=0)), 1)) < lengths[:, None]
    return places
