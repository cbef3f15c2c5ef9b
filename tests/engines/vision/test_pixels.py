"""Images are decoded as they are to be looked at, and their patches are those of transformers' processor."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rollbook.engines.vision import pixels
from rollbook.engines.vision.pixels import decode, patches_of, png_of, resized
from rollbook.engines.vision.sizes import ImageSettings, grid_of
from rollbook.store.errors import ImageError

OWN = ImageSettings(14, 2, 2, 56 * 56, 28 * 28 * 64, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
SETTINGS = {14: OWN, 16: replace(OWN, patch=16, least=4096, most=65536)}


def _noise(height: int, width: int, channels: int = 3, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def _saved(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


@pytest.mark.parametrize("patch", SETTINGS)
@settings(max_examples=60)
@given(height=st.integers(8, 400), width=st.integers(8, 400), seed=st.integers(0, 99))
def test_patches_are_those_of_transformers(patch: int, height: int, width: int, seed: int) -> None:
    """From the image as it comes, and from the PNG of the resized one: the same grid and numbers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = SETTINGS[patch]
    limits = {"shortest_edge": own.least, "longest_edge": own.most}
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size=limits, image_mean=list(own.mean), image_std=list(own.std)
    )
    image = Image.fromarray(_noise(height, width, seed=seed))
    expected = processor(image, return_tensors="np")
    small = resized(image, own)
    made = patches_of(small, own)
    assert [list(grid_of(height, width, own))] == expected["image_grid_thw"].tolist()
    assert made.dtype == np.float32
    assert made.shape == expected["pixel_values"].shape
    assert float(np.abs(made - expected["pixel_values"]).max()) < 1e-6
    again = decode(png_of(small))
    assert resized(again, own) is again
    assert np.array_equal(patches_of(again, own), made)


@settings(max_examples=20)
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), merge=st.integers(1, 3), frames=st.integers(1, 3))
def test_patches_are_cut_out_one_by_one(rows: int, columns: int, merge: int, frames: int) -> None:
    """A slow reading of the rule: squares of patches row by row, in each its patches, in these channels."""
    own = replace(OWN, patch=3, merge=merge, frames=frames)
    array = _noise(rows * own.factor, columns * own.factor)
    expected = []
    for row, column in np.ndindex(rows, columns):
        for inner_row, inner_column in np.ndindex(merge, merge):
            top, left = row * own.factor + 3 * inner_row, column * own.factor + 3 * inner_column
            cut = array[top : top + 3, left : left + 3]
            numbers = [
                [(cut[..., channel] / 255 - own.mean[channel]) / own.std[channel]] * frames
                for channel in range(3)
            ]
            expected.append(np.ravel(numbers))
    assert np.allclose(patches_of(Image.fromarray(array), own), expected, atol=1e-6)


def test_a_size_off_the_grid_has_no_patches() -> None:
    """It would be cut off."""
    with pytest.raises(ImageError, match="30 x 28 pixels has no patches: resize it to multiples of 28"):
        patches_of(Image.fromarray(_noise(28, 30)), OWN)


def test_what_is_transparent_lies_on_white() -> None:
    """As transformers puts it, not as the colour below; in palettes and greys too."""
    clear = np.dstack([_noise(4, 6), np.zeros((4, 6), np.uint8)])
    assert np.asarray(decode(_saved(Image.fromarray(clear)))).min() == 255
    half = np.dstack([np.zeros((4, 6, 3), np.uint8), np.full((4, 6), 128, np.uint8)])
    assert np.asarray(decode(_saved(Image.fromarray(half)))).tolist() == [[[127] * 3] * 6] * 4
    grey = Image.fromarray(np.zeros((4, 6, 2), np.uint8), "LA")
    assert np.asarray(decode(_saved(grey))).min() == 255
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert np.asarray(decode(_saved(palette, transparency=1))).min() == 255
    assert np.asarray(decode(_saved(palette)))[0, 0].tolist() == [10, 20, 30]


def test_an_image_is_turned_as_its_exif_says() -> None:
    """A camera that was held upright: the pixels lie on their side, and a tag says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    array = np.zeros((16, 32, 3), np.uint8)
    array[:, :16] = 255  # the left half is bright; turned to the right, that is the upper half
    image = decode(_saved(Image.fromarray(array), "JPEG", exif=exif, quality=95))
    assert image.size == (16, 32)
    assert np.asarray(image)[:14].min() > 200
    assert np.asarray(image)[18:].max() < 50


def test_greys_become_three_channels() -> None:
    """Of 8 bits and of 16, of which the upper 8 count."""
    grey = _noise(4, 6, 1)[..., 0]
    assert np.array_equal(np.asarray(decode(_saved(Image.fromarray(grey)))), np.dstack([grey] * 3))
    wide = Image.fromarray(grey.astype(np.uint16) << 8)
    assert np.array_equal(np.asarray(decode(_saved(wide))), np.dstack([grey] * 3))


def test_a_png_holds_pixels_alone() -> None:
    """Of equal pixels it is equal, whatever else the image brought; and it gives them back."""
    array = _noise(28, 56)
    tagged = Image.open(io.BytesIO(_saved(Image.fromarray(array), dpi=(300, 300))))
    assert png_of(tagged) == png_of(Image.fromarray(array))
    assert b"pHYs" not in png_of(tagged)
    assert np.array_equal(np.asarray(decode(png_of(tagged))), array)


def test_what_is_no_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes, other formats, half a file, and more pixels than are decoded."""
    image = Image.fromarray(_noise(40, 60))
    whole = _saved(image)
    for data in (b"", b"no image", _saved(image, "EPS"), _saved(image, "TIFF")):
        with pytest.raises(ImageError, match="no image of PNG, JPEG, WEBP, GIF, BMP"):
            decode(data)
    with pytest.raises(ImageError, match="is damaged"):
        decode(whole[: len(whole) // 2])
    monkeypatch.setattr(pixels, "MOST_PIXELS", 2399)
    with pytest.raises(ImageError, match="60 x 40 pixels: at most 2399 are decoded"):
        decode(whole)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_an_image_or_refused(data: bytes, at: int) -> None:
    """Also those of an image with some replaced."""
    whole = _saved(Image.fromarray(_noise(9, 9)))
    for candidate in (data, whole[:at] + data + whole[at + len(data) :]):
        with contextlib.suppress(ImageError):
            assert decode(candidate).mode == "RGB"
