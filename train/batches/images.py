"""The images of a micro-batch as arrays: patches of each that differs once, and where features of them go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollbook.engines.vision.positions import Places, image_tokens, places
from rollbook.engines.vision.sizes import Grid, token_count
from rollbook.store.errors import ImageError


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image in a sample.

    Attributes:
        start: where in the sample its tokens begin.
        digest: of what is seen; pictures with the same one are computed once.
        patches: float32 [rows * columns of the grid, columns of a patch].
    """

    start: int
    grid: Grid
    digest: str
    patches: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of B samples padded to the longest (T).

    Attributes:
        patches: float32 [P, columns of a patch] of all images that differ, one after the other.
        grids: int64 [N, 3] of each of these, in patches.
        at: int64 [2, K], (sample, place in it) of each token that stands for a part of an image.
        features: int64 [K], which of the features goes there; there are as many as the grids have tokens, in
            their order.
        places: int64 [3, B, T] of all tokens along time, rows and columns; 0 in the padding.
    """

    patches: npt.NDArray[np.float32]
    grids: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    places: Places


def collate_images(
    pictures: Sequence[Sequence[Picture]],
    tokens: Sequence[npt.NDArray[np.integer]],
    merge: int,
    image_token: int,
) -> Images | None:
    """The images of samples; None if there are none.

    Args:
        pictures: of each sample, in the order of its tokens.
        tokens: of each sample.
        merge: the side of the square of patches that one token stands for.
        image_token: the id of such tokens.

    Raises:
        ImageError: where a picture is to be, another token is; or as of `engines.vision.positions.places`.
    """
    if not any(pictures):
        return None
    first: dict[str, tuple[int, Picture]] = {}
    count = 0
    placed = np.zeros((3, len(tokens), max(map(len, tokens))), np.int64)
    at, features = [], []
    for row, (own, ids) in enumerate(zip(pictures, tokens, strict=True)):
        spans = (len(ids), [picture.start for picture in own], [picture.grid for picture in own], merge)
        placed[:, row, : len(ids)], _ = places(*spans)
        where = image_tokens(*spans)
        if odd := where[ids[where] != image_token].tolist():
            raise ImageError(
                f"token {odd[0]} of a sample is {ids[odd[0]]}, and should be {image_token}, which stands for "
                "its image: the sample was recorded with another model; leave it out"
            )
        at.append(np.stack([np.full(len(where), row), where]))
        for picture in own:
            start, _ = first.setdefault(picture.digest, (count, picture))
            size = token_count(picture.grid, merge)
            count += size if start == count else 0
            features.append(np.arange(start, start + size))
    distinct = [picture for _, picture in first.values()]
    return Images(
        np.concatenate([picture.patches for picture in distinct]),
        np.array([picture.grid for picture in distinct], np.int64),
        np.concatenate(at, 1),
        np.concatenate(features),
        placed,
    )
