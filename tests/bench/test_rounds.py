"""Taking turns: who goes when, what is timed, when it ends; and what figures are made of. No timing."""

from __future__ import annotations

from itertools import combinations

import pytest

from rollbook.bench.figure import Figure, quantile, spread
from rollbook.bench.rounds import Limit, Work, interleave, order, times_faster


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_each_side_goes_first_equally_often(names: str) -> None:
    """Over a full turn of rounds, of any two sides each comes before the other equally often."""
    rounds = [order(list(names), number) for number in range(2 * len(names))]
    assert all(sorted(sequence) == list(names) for sequence in rounds)
    for a, b in combinations(names, 2):
        assert sum(sequence.index(a) < sequence.index(b) for sequence in rounds) == len(names)
    assert sorted(sequence[0] for sequence in rounds) == sorted(names * 2)


def test_each_side_runs_once_a_round_after_a_warm_up() -> None:
    """Work is made right before it runs; the warm-up is round -1 and is not measured."""
    did: list[tuple[str, str, int]] = []

    def side(name: str, number: int) -> Work:
        did.append(("ready", name, number))
        return lambda: did.append(("run", name, number))

    rounds: list[None] = []
    sides = {name: lambda number, name=name: side(name, number) for name in "ab"}  # type: ignore[misc]
    laps = interleave(sides, Limit(3, 60.0), lambda: rounds.append(None))
    assert [d for d in did if d[0] == "run"] == [
        ("run", name, number)
        for name, number in zip(
            "abababab"[:2] + "abbaba"[:2] + "ba" + "ba", (-1, -1, 0, 0, 1, 1, 2, 2), strict=True
        )
    ]
    assert did[::2] == [("ready", *d[1:]) for d in did[1::2]]
    assert {name: len(measured) for name, measured in laps.items()} == {"a": 3, "b": 3}
    assert len(rounds) == 3
    assert all(lap.wall_s >= 0 and lap.cpu_s >= 0 for measured in laps.values() for lap in measured)


def test_the_time_limit_ends_it_after_one_round() -> None:
    """A limit that has passed leaves one round."""
    laps = interleave({"a": lambda _: lambda: None}, Limit(10**9, 0.0), lambda: None)
    assert len(laps["a"]) == 1


def test_ratios_are_medians_of_rounds() -> None:
    """Half as slow in two rounds of three is twice as fast, whatever the medians of the sides are."""
    assert times_faster([1.0, 1.0, 9.0], [2.0, 2.0, 0.9]) == 2.0


def test_percentiles_are_the_smallest_value_at_rank() -> None:
    """The p-th percentile is the smallest value that `percent` % of the values do not exceed."""
    values = [float(i) for i in range(200, 0, -1)]
    assert [quantile(values, q) for q in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert (quantile([3.0], 99), quantile([], 99)) == (3.0, 0.0)
    result = spread("x", "ms", [3.0, 1.0, 2.0])
    assert (result.low, result.middle, result.high) == (1.0, 2.0, 3.0)
    assert Figure("a", 1.0, "s", None, None, 1).as_json()["against"] is None
