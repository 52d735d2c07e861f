"""Small copies of a prompt's images, for people: in a line of the trajectories. Pillow is there where images are."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import lru_cache

SIDE = 128
"""Pixels of the longer side."""
MOST = 4
"""Of one prompt."""


def thumbnails(images: Sequence[bytes]) -> list[str]:
    """The first MOST images as data URLs; raises ValueError or OSError for one that cannot be read."""
    return [_thumbnail(image) for image in images[:MOST]]


@lru_cache(maxsize=64)
def _thumbnail(image: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(image)) as opened:
        opened.draft("RGB", (SIDE, SIDE))
        small = opened.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
