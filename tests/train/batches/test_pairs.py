"""Pairs of samples from preferences."""

from __future__ import annotations

from rollbook.store.events import PreferenceAdded
from rollbook.train.batches.units import paired


def _of(*named: str) -> list[PreferenceAdded]:
    return [PreferenceAdded(one[0], one[1]) for one in named]


def test_both_sides_must_be_kept() -> None:
    """Pairs in the order of their first record, once each; whoever is left without another side is named."""
    made = paired(_of("ab", "cx", "ba", "ab", "xd", "ad"), {"a": 7, "b": 3, "c": 5, "d": 4, "e": 1})
    assert made.pairs.tolist() == [[7, 3], [3, 7], [7, 4]]
    assert made.alone.tolist() == [5]
    assert made.named == set("abcxd")


def test_nothing_is_preferred() -> None:
    """No pair, of the right shape."""
    made = paired([], {"a": 1})
    assert made.pairs.shape == (0, 2)
    assert made.alone.tolist() == []
