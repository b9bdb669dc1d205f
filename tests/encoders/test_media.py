"""Pictures of every mode, and those that are none."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from omnistage.encoders.media import decode_image
from omnistage.errors import MediaError, MediaTooLarge


def saved(image, form="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def gradient():
    return np.linspace(0, 255, 64, dtype=np.uint8).reshape(8, 8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode):
    form = "TIFF" if mode == "CMYK" else "PNG"
    grey = Image.fromarray(gradient())
    image = Image.fromarray(gradient().astype(np.uint16) << 8) if mode == "I;16" else grey.convert(mode)
    pixels = decode_image(saved(image, form))
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8
    if mode not in ("1", "P"):
        np.testing.assert_allclose(pixels[..., 0], gradient(), atol=1)


def test_transparency_lies_on_white():
    image = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert (decode_image(saved(image)) == 255).all()


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode_image(saved(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).shape == (8, 4, 3)


def test_the_size_is_checked_before_any_pixel_is_decoded():
    header = bytearray(saved(Image.new("L", (1, 1))))
    header[16:24] = (10_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(MediaTooLarge, match="40,000,000"):
        decode_image(bytes(header))
    header[16:24] = (30_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(MediaTooLarge, match="40,000,000"):
        decode_image(bytes(header))


@pytest.mark.parametrize("data", [b"", b"no picture", saved(Image.new("RGB", (64, 64)), "JPEG")[:300]])
def test_what_is_no_picture_is_refused(data):
    with pytest.raises(MediaError):
        decode_image(data)
