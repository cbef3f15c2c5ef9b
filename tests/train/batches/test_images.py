"""The images of a micro-batch: each that differs once, and where its features go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.vision.positions import places
from rollbook.store.errors import ImageError
from rollbook.train.batches.images import Picture, collate_images

PAD = 99
GRIDS = [(1, 2, 2), (1, 4, 2), (1, 2, 6)]
SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=4), min_size=1, max_size=4
)
"""Of each sample: how much text comes before an image, and which image it is."""


def _picture(which: int, start: int) -> Picture:
    """One of three images, whose patches are numbered."""
    grid = GRIDS[which]
    count = grid[1] * grid[2]
    patches = np.repeat(np.arange(count, dtype=np.float32)[:, None] + 100 * which, 5, 1)
    return Picture(start, grid, f"image {which}", patches)


def _sample(parts: list[tuple[int, int]]) -> tuple[np.ndarray[Any, Any], list[Picture]]:
    tokens: list[int] = []
    pictures = []
    for before, which in parts:
        tokens += [1] * before
        pictures.append(_picture(which, len(tokens)))
        tokens += [PAD] * (pictures[-1].grid[1] * pictures[-1].grid[2] // 4)
    return np.array([*tokens, 1, 1]), pictures


@given(SAMPLES)
def test_each_token_of_an_image_gets_its_feature(samples: list[list[tuple[int, int]]]) -> None:
    """By the patches that the feature is made of: the four behind its number."""
    made = [_sample(parts) for parts in samples]
    images = collate_images([pictures for _, pictures in made], [tokens for tokens, _ in made], 2, PAD)
    shown = [(row, picture) for row, (_, pictures) in enumerate(made) for picture in pictures]
    if not shown:
        assert images is None
        return
    assert images is not None
    expected = []
    for row, picture in shown:
        for token in range(len(picture.patches) // 4):
            first = float(picture.patches[4 * token, 0])
            expected.append((row, picture.start + token, first))
    found = zip(*images.at.tolist(), images.patches[4 * images.features, 0].tolist(), strict=True)
    assert [*found] == expected
    distinct = {picture.digest: picture for _, picture in shown}
    assert len(images.patches) == sum(len(picture.patches) for picture in distinct.values())
    assert [tuple(grid) for grid in images.grids.tolist()] == [p.grid for p in distinct.values()]
    for row, (tokens, pictures) in enumerate(made):
        own, _ = places(len(tokens), [p.start for p in pictures], [p.grid for p in pictures], 2)
        assert np.array_equal(images.places[:, row, : len(tokens)], own)
        assert not images.places[:, row, len(tokens) :].any()


def test_images_that_are_not_where_they_should_be_are_refused() -> None:
    """Another token is there, by the model that sampled it; and a video."""
    tokens, pictures = _sample([(2, 1)])
    with pytest.raises(ImageError, match="token 2 of a sample is 99, and should be 98"):
        collate_images([pictures], [tokens], 2, 98)
    with pytest.raises(ImageError, match="a grid of 2 frames is a video's"):
        collate_images([[Picture(0, (2, 2, 2), "video", pictures[0].patches)]], [tokens], 2, PAD)
