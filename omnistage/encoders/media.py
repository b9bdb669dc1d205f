"""Pictures from bytes to arrays, with limits; sound is omnistage.audio's."""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from omnistage.errors import MediaError, MediaTooLarge

MAX_IMAGE_PIXELS = 40_000_000


def decode_image(data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS) -> NDArray[np.uint8]:
    """Decode a picture, turned upright by its EXIF orientation, transparency over white.

    Returns uint8 [height, width, 3].  The size is checked before any pixel is decoded.
    Raises MediaError for bytes that are no complete picture, MediaTooLarge above max_pixels.
    """
    if not data:
        raise MediaError("the image is empty (0 bytes); send the file's bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow's own size and metadata warnings; the limit below decides
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise MediaTooLarge(
                        f"the image has {width} x {height} = {width * height:,} pixels, more than the "
                        f"limit of {max_pixels:,}; scale it down"
                    )
                image.load()
                upright = ImageOps.exif_transpose(image)
                return np.asarray(_on_white(upright), dtype=np.uint8)
    except MediaTooLarge:
        raise
    except Image.DecompressionBombError as error:
        raise MediaTooLarge(f"the image has more than {max_pixels:,} pixels; scale it down") from error
    except UnidentifiedImageError as error:
        raise MediaError(
            f"the {len(data)} bytes are not a picture in a known format; send PNG, JPEG, WebP, GIF or BMP"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, KeyError) as error:
        # Pillow's decoders raise all of these for damaged files.
        raise MediaError(f"the image is damaged or truncated ({error}); send the whole file") from error


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, rgba).convert("RGB")
    if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would cut off at 255
        levels = np.asarray(image).astype(np.int64)
        return Image.fromarray((levels >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
