"""Returns and advantages of tokens, from the rewards of tokens. Pure numpy.

Tokens of samples lie one after the other, [P]; `lengths` [N] says how many are of each sample. Only trained
tokens count: what a tool or a user said in between takes no step of discount, as in verl.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollbook.train.algorithms.rollouts import Floats, Ints

Bools = npt.NDArray[np.bool_]
_T = TypeVar("_T", bound=np.generic)


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


def whitened(values: Floats, ddof: int, *, epsilon: float = 1e-8) -> Floats:
    """(values - mean) / sqrt(variance + epsilon), [P].

    A single value has variance 0. Its sources differ in the variance: verl's `masked_whiten` has the unbiased
    one (`ddof` 1), OpenRLHF the biased one (0); both have this epsilon.
    """
    if not len(values):
        return values.copy()
    mean = values.mean()
    square = ((values - mean) ** 2).sum() / max(len(values) - ddof, 1)
    return np.asarray((values - mean) / np.sqrt(square + epsilon))


def of_tokens(values: npt.NDArray[_T], lengths: Ints) -> npt.NDArray[_T]:
    """A value of each sample [N] for each of its tokens, [P]."""
    return np.repeat(values, lengths)


def at_last_tokens(values: Floats, lengths: Ints) -> Floats:
    """A value of each sample [N] at its last token, 0 at the others, [P]."""
    placed = np.zeros(int(lengths.sum()))
    has = lengths > 0
    placed[(np.cumsum(lengths) - 1)[has]] = values[has]
    return placed


def _places(lengths: Ints) -> Bools:
    """Where the tokens are in an array [N, longest], row by row; rows end at the last column."""
    longest = max(int(lengths.max(initial=0)), 1)
    places: Bools = np.arange(longest) >= (longest - lengths)[:, None]
    return places


def _padded(values: Floats, places: Bools) -> Floats:
    """Values [P] as [N, longest]; zeros come before a shorter sample, so that all end together."""
    padded = np.zeros(places.shape)
    padded[places] = values
    return padded
