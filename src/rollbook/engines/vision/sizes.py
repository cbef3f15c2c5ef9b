"""The settings of a model's image processor, and what follows from them: the size that an image is given, its
grid of patches, how many tokens stand for it. Pure, but for `read_image_settings`.

The rule of sizes is that of Qwen2-VL (arXiv:2409.12191, section 2.1), as its published image processor has
it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollbook.engines.model_files import read_json
from rollbook.store.digest import digest_json
from rollbook.store.errors import ImageError, ModelError

Grid = tuple[int, int, int]
"""An image in patches: (frames, rows, columns). Of an image there is one frame; more are a video's."""

FILES = ("processor_config.json", "preprocessor_config.json")
"""The files with the settings: a whole processor's, with the image processor's within; or its own alone."""
KIND = "Qwen2VLImageProcessor"
"""How the names of the image processors begin that are computed here."""
BICUBIC = 3
"""Pillow's number of the filter that images are resized by."""
STEEPEST = 200
"""The longer side of an image may be so many times the shorter one."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Of an image processor.

    Attributes:
        patch: the side of a patch, in pixels.
        merge: the side of the square of patches that one token stands for.
        frames: how often an image is repeated within a patch, which a video fills with frames.
        least, most: pixels of an image that was resized.
        mean, std: by which the channels are normalized, once they are within 0 and 1.
    """

    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """The sides of an image that was resized are multiples of it, in pixels."""
        return self.patch * self.merge

    @property
    def columns(self) -> int:
        """Numbers of a patch."""
        return 3 * self.frames * self.patch * self.patch

    @property
    def digest(self) -> str:
        """sha256 of the settings: of equal ones the same patches are made."""
        return digest_json(asdict(self))


def read_image_settings(model: Path) -> ImageSettings:
    """The settings in a model directory.

    Raises:
        ModelError: there are none, or they ask for what is not computed here.
    """
    for name in FILES:
        values = read_json(model, name)
        values = values.get("image_processor") or {} if name == FILES[0] else values
        if values:
            try:
                return _settings(values)
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(
                    f"{model / name}: no image processor that can be used: {error}; copy the model anew, or "
                    "choose one of qwen2_5_vl or qwen3_vl"
                ) from error
    raise ModelError(
        f"{model}: holds neither {' nor '.join(FILES)}, so it takes no images; copy the model anew"
    )


def _settings(values: dict[str, Any]) -> ImageSettings:
    kind = values.get("image_processor_type", KIND)
    if not str(kind).startswith(KIND):
        raise ValueError(f"image_processor_type is {kind!r}, not {KIND}")
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if values.get(step) not in (None, True):
            raise ValueError(f"{step} is {values[step]!r}")
    if values.get("resample", BICUBIC) != BICUBIC:
        raise ValueError(f"resample is {values['resample']!r}, not {BICUBIC}, which is bicubic")
    if not math.isclose(values.get("rescale_factor") or 1 / 255, 1 / 255):
        raise ValueError(f"rescale_factor is {values['rescale_factor']!r}, not 1 / 255")
    size = values.get("size") or {}
    # Older names of the limits, where both are there, are what counts.
    least = values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    most = values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    settings = ImageSettings(
        patch=_whole("patch_size", values.get("patch_size", 14)),
        merge=_whole("merge_size", values.get("merge_size", 2)),
        frames=_whole("temporal_patch_size", values.get("temporal_patch_size", 2)),
        least=_whole("the least number of pixels", least),
        most=_whole("the greatest number of pixels", most),
        mean=_channels("image_mean", values.get("image_mean") or _CLIP_MEAN),
        std=_channels("image_std", values.get("image_std") or _CLIP_STD),
    )
    if settings.least > settings.most or settings.most < settings.factor**2:
        raise ValueError(f"no image has from {settings.least} to {settings.most} pixels")
    return settings


def _whole(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, not a whole number above 0")
    return value


def _channels(key: str, value: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, value)
    if key == "image_std" and not min(red, green, blue) > 0:
        raise ValueError(f"{key} is {value!r}, not above 0")
    return red, green, blue


def smart_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """(height, width) in pixels that an image is resized to: multiples of `factor` with about the same ratio,
    and as many pixels as the model takes.

    Raises:
        ImageError: it is far longer than wide, or has no pixels.
    """
    if min(height, width) < 1 or max(height, width) > STEEPEST * min(height, width):
        raise ImageError(
            f"an image of {width} x {height} pixels: a model takes none with a side more than {STEEPEST} "
            "times the other; cut it, or leave it out"
        )
    factor = settings.factor
    nearest = (round(height / factor) * factor, round(width / factor) * factor)
    if nearest[0] * nearest[1] > settings.most:
        shrunk = math.sqrt(height * width / settings.most)
        return _down(height / shrunk, factor), _down(width / shrunk, factor)
    if nearest[0] * nearest[1] < settings.least:
        grown = math.sqrt(settings.least / (height * width))
        return _up(height * grown, factor), _up(width * grown, factor)
    return nearest


def _down(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)


def _up(side: float, factor: int) -> int:
    return math.ceil(side / factor) * factor


def grid_of(height: int, width: int, settings: ImageSettings) -> Grid:
    """The grid of an image that comes with this size, and is resized.

    Raises:
        ImageError: as `smart_size`.
    """
    resized = smart_size(height, width, settings)
    return 1, resized[0] // settings.patch, resized[1] // settings.patch


def token_count(grid: Grid, merge: int) -> int:
    """The tokens that stand for an image."""
    frames, rows, columns = grid
    return frames * rows * columns // merge**2
