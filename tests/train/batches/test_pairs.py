"""Pairs of samples from preferences."""

from __future__ import annotations

from rollbook.store.events import PreferenceAdded
from rollbook.train.batches.units import paired


def _preferences(*named: str) -> list[PreferenceAdded]:
    return [PreferenceAdded(pair[0], pair[1]) for pair in named]


def test_both_sides_must_be_kept() -> None:
    """Pairs in the order of their first record, once each; whoever is left without another side is named."""
    pairing = paired(
        _preferences("ab", "cx", "ba", "ab", "xd", "ad"), {"a": 7, "b": 3, "c": 5, "d": 4, "e": 1}
    )
    assert pairing.pairs.tolist() == [[7, 3], [3, 7], [7, 4]]
    assert pairing.alone.tolist() == [5]
    assert pairing.named == set("abcxd")


def test_nothing_is_preferred() -> None:
    """No pair, of the right shape."""
    pairing = paired([], {"a": 1})
    assert pairing.pairs.shape == (0, 2)
    assert pairing.alone.tolist() == []
