"""Sizes, grids and tokens of images are those of transformers' image processor, by settings of either
form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.engines.vision.sizes import (
    ImageSettings,
    grid_of,
    read_image_settings,
    smart_size,
    token_count,
)
from rollbook.store.errors import ImageError, ModelError

NARROW = ImageSettings(14, 2, 2, 56 * 56, 28 * 28 * 64, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
SETTINGS = {
    "narrow": NARROW,
    "qwen2_5_vl": replace(NARROW, most=12845056),
    "qwen3_vl": replace(NARROW, patch=16, least=65536, most=16777216),
    "one size": replace(NARROW, least=28 * 28 * 16, most=28 * 28 * 16),
}
SIDES = st.integers(1, 3000)


def _written(folder: Path, values: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", SETTINGS)
@given(height=SIDES, width=SIDES)
def test_grids_are_those_of_transformers(name: str, height: int, width: int) -> None:
    """Of every size that is taken; of a grid's patches four have one token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    settings = SETTINGS[name]
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match=f"an image of {width} x {height} pixels"):
            smart_size(height, width, settings)
        return
    expected = smart_resize(height, width, settings.factor, settings.least, settings.most)
    assert smart_size(height, width, settings) == expected
    grid = grid_of(height, width, settings)
    assert grid == (1, expected[0] // settings.patch, expected[1] // settings.patch)
    assert token_count(grid, 2) == expected[0] * expected[1] // settings.factor**2


@pytest.mark.parametrize("name", ["narrow", "qwen3_vl"])
@given(height=SIDES, width=SIDES)
def test_an_image_that_was_resized_keeps_its_size(name: str, height: int, width: int) -> None:
    """A second look at it changes nothing, unless it is so steep that no size is within the limits."""
    settings = SETTINGS[name]
    if max(height, width) < 20 * min(height, width):
        size = smart_size(height, width, settings)
        assert smart_size(*size, settings) == size


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    """A processor's with the image processor's within, or that alone; limits by newer or older names."""
    values = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "resample": 3}
    values |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
    limits = (
        {"size": {"shortest_edge": 4096, "longest_edge": 65536}},
        {"min_pixels": 4096, "max_pixels": 65536},
    )
    expected = ImageSettings(16, 2, 2, 4096, 65536, (0.5,) * 3, (0.5,) * 3)
    for at, more in enumerate(limits):
        nested = _written(tmp_path / f"a{at}", {"image_processor": values | more}, "processor_config.json")
        assert read_image_settings(nested) == expected
        # A processor's own file says nothing of images where these have another.
        _written(tmp_path / f"b{at}", {"processor_class": "P"}, "processor_config.json")
        flat = _written(tmp_path / f"b{at}", values | more)
        assert read_image_settings(flat) == expected
    both = _written(tmp_path / "both", values | limits[1] | {"size": {"shortest_edge": 1, "longest_edge": 2}})
    assert read_image_settings(both) == expected
    assert (expected.factor, expected.columns) == (32, 1536)
    assert expected.digest == replace(expected).digest != replace(expected, most=65537).digest


def test_settings_left_out_are_those_of_transformers(tmp_path: Path) -> None:
    """A file that names the processor alone has its defaults."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = read_image_settings(_written(tmp_path / "m", {"image_processor_type": "Qwen2VLImageProcessor"}))
    theirs = Qwen2VLImageProcessorPil()
    assert (own.patch, own.merge, own.frames) == (14, 2, 2)
    assert {"shortest_edge": own.least, "longest_edge": own.most} == dict(theirs.size)
    assert [*own.mean, *own.std] == [*theirs.image_mean, *theirs.image_std]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "SiglipImageProcessor"),
        ({"do_resize": False}, "do_resize is False"),
        ({"resample": 2}, "resample is 2"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"patch_size": "14"}, "patch_size is '14'"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"image_mean": [0.5]}, "not enough values"),
        ({"min_pixels": 10**6, "max_pixels": 10**5}, "from 1000000 to 100000 pixels"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """The file, the key and its value are named, and what to do."""
    folder = _written(tmp_path / "m", {"patch_size": 14} | changes)
    with pytest.raises(ModelError, match=named) as caught:
        read_image_settings(folder)
    assert "preprocessor_config.json" in str(caught.value)
    assert "copy the model anew" in str(caught.value)


def test_a_model_without_images_has_no_settings(tmp_path: Path) -> None:
    """Both files that could hold them are named."""
    with pytest.raises(ModelError, match=r"neither processor_config\.json nor preprocessor_config\.json"):
        read_image_settings(tmp_path)
