"""Places of tokens are those of transformers, and of a slow reading of the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.vision.positions import image_tokens, places
from rollbook.engines.vision.sizes import Grid, token_count
from rollbook.store.errors import ImageError

Tokens = list[int | Grid]
"""Numbers of text tokens, and grids of images."""
GRIDS = st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)).map(lambda g: (1, 2 * g[1], 2 * g[2]))
PARTS = st.lists(st.tuples(st.integers(1, 9), GRIDS), max_size=4)
"""Text before each image, which transformers needs between two of them."""


def _laid_out(parts: list[tuple[int, Grid]], after: int) -> tuple[int, list[int], list[Grid]]:
    """(how many tokens, where images begin, their grids)"""
    count, starts = 0, []
    for before, grid in parts:
        starts.append(count + before)
        count += before + token_count(grid, 2)
    return count + after, starts, [grid for _, grid in parts]


@given(PARTS, st.integers(0, 9))
def test_places_follow_the_rule_token_by_token(parts: list[tuple[int, Grid]], after: int) -> None:
    """Text counts on; an image's tokens lie in its grid; what follows is behind its longest side."""
    count, starts, grids = _laid_out(parts, after)
    expected, place = [], 0
    for before, (_, rows, columns) in [*parts, (after, (1, 0, 0))]:
        for _ in range(before):
            expected.append((place, place, place))
            place += 1
        for row in range(rows // 2):
            for column in range(columns // 2):
                expected.append((place, place + row, place + column))
        place += max(rows, columns) // 2
    placed, following = places(count, starts, grids, 2)
    assert placed.dtype == np.int64
    assert placed.T.tolist() == [list(entry) for entry in expected]
    assert following == place


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
@given(parts=PARTS, after=st.integers(1, 9))
def test_places_are_those_of_transformers(rope_index: Any, family: str, parts: Any, after: int) -> None:
    """Of both families, images and text in any order that they take."""
    count, starts, grids = _laid_out(parts, after)
    at = image_tokens(count, starts, grids, 2)
    expected, delta = rope_index(family, count, at, grids)
    placed, following = places(count, starts, grids, 2)
    assert np.array_equal(placed, expected)
    assert following - count == delta


@pytest.fixture(scope="module")
def rope_index() -> Any:
    """Transformers' own computation: (family, count, places of image tokens, grids) -> ([3, count], delta)"""
    import torch
    import transformers

    def of(family: str, count: int, at: Any, grids: list[Grid]) -> tuple[Any, int]:
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 8}
        vision |= {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]} if "3" in family else {}
        text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        text |= {"vocab_size": 9, "num_key_value_heads": 1, "head_dim": 8}
        if family not in made:
            config = getattr(transformers, f"{family}Config")(
                text_config=text, vision_config=vision, image_token_id=7, video_token_id=8
            )
            made[family] = getattr(transformers, f"{family}Model")(config)
        ids = torch.zeros(1, count, dtype=torch.long)
        ids[0, at] = 7
        grid = torch.tensor(grids) if grids else None
        placed, delta = made[family].get_rope_index(ids, (ids == 7).int(), grid)
        return placed[:, 0].numpy(), int(delta)

    made: dict[str, Any] = {}
    return of


def test_images_may_touch() -> None:
    """Two with no token between, and one at either end."""
    placed, following = places(3, [0, 2], [(1, 2, 4), (1, 2, 2)], 2)
    assert placed.tolist() == [[0, 0, 2], [0, 0, 2], [0, 1, 2]]
    assert following == 3


@pytest.mark.parametrize(
    ("starts", "grids", "named"),
    [
        ([0], [(2, 2, 2)], "a grid of 2 frames is a video's"),
        ([0], [(1, 3, 2)], "3 x 2 patches is no multiple of 2"),
        ([0], [(1, 0, 2)], "0 x 2 patches"),
        ([0, 1], [(1, 2, 2)], "2 places for 1 images"),
        ([0, 1], [(1, 2, 4), (1, 2, 2)], "ends at 2"),
        ([3], [(1, 2, 4)], "ends at 5"),
        ([-1], [(1, 2, 4)], "tokens -1 on"),
        ([2, 0], [(1, 2, 2), (1, 2, 2)], "ends at 3"),
    ],
)
def test_what_cannot_be_is_refused(starts: list[int], grids: list[Grid], named: str) -> None:
    """Videos, grids that no tokens stand for, and images where none can lie."""
    with pytest.raises(ImageError, match=named):
        places(4, starts, grids, 2)
