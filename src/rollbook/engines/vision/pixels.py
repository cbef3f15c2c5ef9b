"""An image's bytes to the pixels that a model sees: decoded, resized, and as patches. Pure.

Pillow resizes in whole numbers. So the pixels of an image, and with them its patches, are the same wherever
they are computed, which is why images are resized here, and sent and kept in the size in which models see
them.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from rollbook.engines.vision.sizes import ImageSettings, smart_size
from rollbook.store.errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded. Pillow knows more, some of which start other programs."""
MOST_PIXELS = 1 << 26
"""Of an image as it comes: a small file may hold a huge one."""


def decode(data: bytes) -> Image.Image:
    """An image in RGB, as it is to be looked at: turned as its EXIF says, on white where it is transparent,
    and the first picture where it holds several.

    Raises:
        ImageError: the bytes are no image of `FORMATS`, are damaged, or it has too many pixels.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ImageError(
                    f"an image of {width} x {height} pixels: at most {MOST_PIXELS} are decoded; "
                    "make it smaller"
                )
            image.load()
            return _rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{len(data)} bytes that are no image of {', '.join(FORMATS)}: save it as one of these"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ImageError(f"an image of {len(data)} bytes is damaged ({error}): save it anew") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")


def resized(image: Image.Image, settings: ImageSettings) -> Image.Image:
    """An image in the size in which a model sees it; one that has it stays as it is.

    Raises:
        ImageError: as `smart_size`.
    """
    height, width = smart_size(image.height, image.width, settings)
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def png_of(image: Image.Image) -> bytes:
    """An image as a PNG, without anything beside its pixels: the same bytes from the same Pillow."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def patches_of(image: Image.Image, settings: ImageSettings) -> npt.NDArray[np.float32]:
    """The patches of a resized image in RGB, float32 [rows * columns of its grid, `settings.columns`].

    The patches that one token stands for lie together, row by row, and these squares row by row too. Within a
    patch come its channels, in each of them the image as often as `frames` says.

    Raises:
        ImageError: its sides are no multiples of the settings' factor.
    """
    patch, merge, factor = settings.patch, settings.merge, settings.factor
    pixels = np.asarray(image)
    height, width, channels = pixels.shape
    if height % factor or width % factor:
        raise ImageError(
            f"an image of {width} x {height} pixels has no patches: resize it to multiples of {factor}"
        )
    mean, std = np.array([settings.mean, settings.std], np.float32)
    scaled = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
    sides = (height // factor, merge, patch, width // factor, merge, patch)
    squares = scaled.reshape(*sides, channels).transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(squares[:, :, :, :, :, None], settings.frames, axis=5)
    return np.ascontiguousarray(repeated.reshape(-1, settings.columns))
