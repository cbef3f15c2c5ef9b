"""Returns, GAE and whitening, held against loops in plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.returns import (
    at_last_tokens,
    discounted_returns,
    generalized_advantages,
    of_tokens,
    whitened,
    whole_returns,
)
from rollbook.train.algorithms.rollouts import Rollouts

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)
SHARE = st.floats(0, 1)


def _rows(lengths: Sequence[int], seed: int) -> list[list[float]]:
    """A row of random numbers for each sample."""
    random = np.random.default_rng(seed)
    return [random.normal(size=length).tolist() for length in lengths]


def _flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row], np.float64)


def test_returns_by_hand() -> None:
    """Two samples, of three tokens and of one, at a discount of 1/2."""
    returns = discounted_returns(np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1]), 0.5)
    assert returns.tolist() == [1 + (2 + 4 / 2) / 2, 2 + 4 / 2, 4, 8]


def test_gae_by_hand() -> None:
    """Rewards 0, 1; values 0.5, 0.25; discount 1/2, decay 1/2."""
    advantages = generalized_advantages(np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.array([2]), 0.5, 0.5)
    last = 1 - 0.25
    assert advantages.tolist() == [0 + 0.5 * 0.25 - 0.5 + 0.25 * last, last]


@given(LENGTHS, st.integers(0, 2**31), SHARE)
def test_returns_are_those_of_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    """Each sample by itself, bit for bit, so that recorded steps replay; samples without a trained token have
    none."""
    rows = _rows(lengths, seed)
    expected = []
    for row in rows:
        total, returns = 0.0, []
        for reward in reversed(row):
            total = reward + discount * total
            returns.insert(0, total)
        expected += returns
    result = discounted_returns(_flat(rows), np.array(lengths), discount)
    assert result.tolist() == expected


@given(LENGTHS, st.integers(0, 2**31), SHARE, SHARE)
def test_gae_is_that_of_a_loop(lengths: list[int], seed: int, discount: float, decay: float) -> None:
    """As the paper sums it: powers of discount times decay over the temporal differences."""
    rewards, values = _rows(lengths, seed), _rows(lengths, seed + 1)
    expected: list[float] = []
    for reward, value in zip(rewards, values, strict=True):
        after = [*value[1:], 0.0][: len(value)]
        deltas = [r + discount * n - v for r, n, v in zip(reward, after, value, strict=True)]
        factor = discount * decay
        expected += [sum(factor**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    advantages = generalized_advantages(_flat(rewards), _flat(values), np.array(lengths), discount, decay)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(LENGTHS, st.integers(0, 2**31))
def test_with_decay_1_the_critics_target_is_the_return(lengths: list[int], seed: int) -> None:
    """A + V telescopes to the discounted return, whatever the values are."""
    rewards, values, sizes = _flat(_rows(lengths, seed)), _flat(_rows(lengths, seed + 1)), np.array(lengths)
    target = generalized_advantages(rewards, values, sizes, 0.9, 1.0) + values
    assert target == pytest.approx(discounted_returns(rewards, sizes, 0.9), abs=1e-9)


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30))
def test_whitened_values(values: list[float]) -> None:
    """Mean 0, and a variance of 1 over n - 1 or n, but for the epsilon."""
    array = np.array(values)
    for ddof, variance in ((1, statistics.variance), (0, statistics.pvariance)):
        spread = variance(values)
        result = whitened(array, ddof)
        assert result.mean() == pytest.approx(0, abs=1e-6)
        assert variance(result.tolist()) == pytest.approx(spread / (spread + 1e-8), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0]])
def test_nothing_to_whiten_is_no_nan(values: list[float]) -> None:
    """No value, one, and equal ones come out as zeros."""
    assert whitened(np.array(values), 1).tolist() == [0.0] * len(values)


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 40_000, 70_001, 300_003])
@pytest.mark.parametrize("ddof", [0, 1])
def test_whitened_values_have_the_bits_of_sums_over_all_at_once(count: int, ddof: int) -> None:
    """However many there are: recorded steps were computed so; also where they take the values' place."""
    values = np.random.default_rng(count).standard_normal(count)
    expected = values.copy()
    if count:
        mean = values.mean()
        square = ((values - mean) ** 2).sum() / max(count - ddof, 1)
        expected = (values - mean) / np.sqrt(square + 1e-8)
    assert whitened(values, ddof).tobytes() == expected.tobytes()
    place = values.copy()
    assert whitened(place, ddof, out=place) is place
    assert place.tobytes() == expected.tobytes()


@given(st.lists(st.tuples(st.sampled_from([0.0, -0.0, 1.5, -2.0, np.nan]), st.integers(0, 4)), max_size=8))
def test_whole_returns_are_those_without_a_discount(samples: list[tuple[float, int]]) -> None:
    """Bit for bit, the sign of a zero too."""
    values = np.array([value for value, _ in samples], np.float64)
    lengths = np.array([length for _, length in samples], np.int64)
    expected = discounted_returns(at_last_tokens(values, lengths), lengths, 1.0)
    assert whole_returns(values, lengths).tobytes() == expected.tobytes()


def test_values_of_samples_at_their_tokens() -> None:
    """At each token, or at the last alone; a sample without tokens has no place."""
    values, lengths = np.array([1.0, 2.0, 3.0]), np.array([2, 0, 1])
    assert of_tokens(values, lengths).tolist() == [1, 1, 3]
    assert at_last_tokens(values, lengths).tolist() == [0, 1, 3]


@given(LENGTHS, st.integers(0, 2**31), SHARE, SHARE)
def test_gae_has_the_bits_of_a_loop(lengths: list[int], seed: int, discount: float, decay: float) -> None:
    """From the last token to the first, in the order in which recorded steps were computed."""
    rewards, values = _rows(lengths, seed), _rows(lengths, seed + 1)
    expected: list[float] = []
    for reward, value in zip(rewards, values, strict=True):
        advantages: list[float] = []
        for t in reversed(range(len(reward))):
            delta = reward[t] - value[t]
            if advantages:
                delta = delta + discount * value[t + 1] + discount * decay * advantages[0]
            advantages.insert(0, delta)
        expected += advantages
    result = generalized_advantages(_flat(rewards), _flat(values), np.array(lengths), discount, decay)
    assert result.tolist() == expected


def test_whitening_by_the_mean_alone() -> None:
    """Over all trained tokens of the rollout batch, so that long samples weigh more; nothing is divided."""
    keys = {"baseline": "none", "deviation": "none", "whitening": "mean"}
    algorithm = recorded_algorithm({"name": "policy_gradient"} | keys)
    rollouts = Rollouts(np.array([1.0, 5.0]), np.zeros(2, np.int64), np.arange(2), np.array([3, 1]))
    advantages = algorithm.advantages(rollouts)
    assert (advantages.per_token, advantages.values.tolist()) == (True, [-1.0, -1.0, -1.0, 3.0])
    nothing = Rollouts(np.array([1.0]), np.zeros(1, np.int64), np.arange(1), np.array([0]))
    assert algorithm.advantages(nothing).values.tolist() == []
