"""Places of tokens along three axes, by which queries and keys of vision-language models are rotated: time,
rows and columns. Pure.

As of Qwen2-VL (arXiv:2409.12191, section 2.1), of images: a text token has one place on all axes, one after
the token before it. The tokens of an image lie in its grid, which begins where a text token would stand; what
follows stands behind the longest side of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rollbook.engines.vision.sizes import Grid, token_count
from rollbook.store.errors import ImageError

Places = npt.NDArray[np.int64]
"""int64 [3, T]: along time, rows and columns."""


def places(count: int, starts: Sequence[int], grids: Sequence[Grid], merge: int) -> tuple[Places, int]:
    """The places of tokens [3, count], and the place of the token that comes behind them.

    Args:
        starts: where in the tokens each image begins, in their order.
        grids: of the images, in patches.
        merge: the side of the square of patches that one token stands for.

    Raises:
        ImageError: a grid is a video's, or no multiple of `merge`; or images overlap, or do not fit in.
    """
    placed = np.empty((3, count), np.int64)
    at = place = 0
    for start, end, grid in _spans(count, starts, grids, merge):
        placed[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        _, rows, columns = grid
        rows, columns = rows // merge, columns // merge
        placed[0, start:end] = place
        placed[1, start:end] = place + np.repeat(np.arange(rows), columns)
        placed[2, start:end] = place + np.tile(np.arange(columns), rows)
        place, at = place + max(rows, columns), end
    placed[:, at:] = np.arange(place, place + count - at)
    return placed, place + count - at


def image_tokens(
    count: int, starts: Sequence[int], grids: Sequence[Grid], merge: int
) -> npt.NDArray[np.int64]:
    """Where in the tokens those of images are, int64 [K], in their order. Arguments and errors as of
    `places`."""
    spans = _spans(count, starts, grids, merge)
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end, _ in spans)])


def _spans(
    count: int, starts: Sequence[int], grids: Sequence[Grid], merge: int
) -> list[tuple[int, int, Grid]]:
    if len(starts) != len(grids):
        raise ImageError(f"{len(starts)} places for {len(grids)} images: each needs one")
    for frames, rows, columns in grids:
        if frames != 1:
            raise ImageError(f"a grid of {frames} frames is a video's, which is not supported: send images")
        if min(rows, columns) < merge or rows % merge or columns % merge:
            raise ImageError(
                f"a grid of {rows} x {columns} patches is no multiple of {merge}: resize the image"
            )
    ends = [start + token_count(grid, merge) for start, grid in zip(starts, grids, strict=True)]
    for before, after in pairwise([(0, 0), *zip(starts, ends, strict=True), (count, count)]):
        if after[0] < before[1]:
            raise ImageError(
                f"tokens {after[0]} on are an image's, or the end, and the image before ends at {before[1]}: "
                "record the conversation anew"
            )
    return list(zip(starts, ends, grids, strict=True))
