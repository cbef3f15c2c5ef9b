"""Samples shared out so that forward passes are of about equal work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.batches.batch import balanced, packs

WORK = st.lists(st.integers(0, 10_000), max_size=60)


@given(WORK, st.integers(1, 12))
def test_each_item_is_in_one_part(work: list[int], parts: int) -> None:
    """As many parts as asked for, in the order of their first items; the heaviest is no heavier than by
    chance."""
    split = balanced(work, parts)
    assert len(split) == parts
    assert sorted(itertools.chain(*split)) == list(range(len(work)))
    assert [part for part in split if part] == sorted(part for part in split if part)
    assert all(part == sorted(part) for part in split)
    heaviest = max(sum(work[i] for i in part) for part in split)
    assert heaviest <= sum(work) / parts + max(work, default=0)
    assert balanced(work, parts) == split


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_against_every_partition(work: list[int], parts: int) -> None:
    """The difference method is at most 4/3 of the best there is (Michiels et al. 2003: 4/3 - 1/3k)."""
    best = min(
        max(sum(size for size, at in zip(work, places, strict=True) if at == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(work))
    )
    heaviest = max(sum(work[i] for i in part) for part in balanced(work, parts))
    assert best <= heaviest <= best * 4 / 3


def test_the_textbooks_example() -> None:
    """8, 7, 6, 5 and 4 in two parts: the differences 1, 1 and 4 leave 2, which is 16 against 14."""
    work = [8, 7, 6, 5, 4]
    assert sorted(sum(work[i] for i in part) for part in balanced(work, 2)) == [14, 16]


def test_long_tailed_lengths_over_eight_ranks() -> None:
    """Lengths as agents have them, whose longest is a hundredth of the work: 2 % from equal at most."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.minimum(rng.lognormal(7, 1, 1024), 16_384).astype(int).tolist()
        sums = [sum(lengths[i] for i in part) for part in balanced(lengths, 8)]
        assert max(sums) * 8 / sum(sums) <= 1.02


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_packs_hold_what_they_may(lengths: list[int], most: int) -> None:
    """At most so many tokens, but for an item that is longer; no part is empty; about as few as can be."""
    work = [n * (1000 + n) for n in lengths]
    split = packs(lengths, work, most)
    assert sorted(itertools.chain(*split)) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in split]
    assert all(tokens <= most or len(part) == 1 for tokens, part in zip(sums, split, strict=True))
    assert all(split)
    fewest = sum(min(n, most) for n in lengths) / most
    assert len(split) <= 2 * fewest + 2 + sum(n > most for n in lengths)


@pytest.mark.parametrize(("most", "parts"), [(10, 1), (9, 2), (1, 4)])
def test_few_parts(most: int, parts: int) -> None:
    """One where all fit; else more."""
    assert len(packs([4, 3, 2, 1], [4, 3, 2, 1], most)) == parts
