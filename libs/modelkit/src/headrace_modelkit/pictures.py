"""Image files as RGB images of Pillow, which is an extra, imported when one comes."""

from __future__ import annotations

import io
from typing import Any

from headrace_schema.images import IMAGE_FORMATS, MOST_IMAGE_PIXELS, why_not_rgb


def decode_image(data: bytes) -> Any:
    """An RGB image of Pillow, turned as its EXIF orientation says.

    Raises ValueError for what is no image, for one that is too large, and for one that does not say what it is in RGB.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > MOST_IMAGE_PIXELS:
            raise ValueError(f"an image of {image.width} x {image.height} pixels is too large")
        image.load()
        if (why_not := why_not_rgb(image)) is not None:
            raise ValueError(f"an image {'; '.join(why_not)}")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
