"""Small copies of the images of prompts and messages, for people: in a line of the trajectories.

Without Pillow, which data with images needs and conversations do not, there are none.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import msgspec
from headrace_schema.images import IMAGE_FORMATS, kind_of

from headrace_coordinator.projections.trajectories import Message

SIDE = 128
"""Pixels of the longer side."""
MOST = 4
"""Most images of one prompt, or of one message."""
MOST_OF_TALK = 16
"""Most images of one conversation."""


def thumbnails(images: Sequence[bytes]) -> list[str]:
    """The first MOST images as data URLs, without videos and sounds; raises ValueError or OSError for a broken one."""
    if find_spec("PIL") is None:
        return []
    return [_thumbnail(image) for image in images if kind_of(image) == "image"][:MOST]


def with_thumbnails(messages: Sequence[Message]) -> list[Message]:
    """Messages with small copies in place of their images' files."""
    found, room = [], MOST_OF_TALK
    for message in messages:
        small = thumbnails(message.files[:room])
        room -= len(small)
        found.append(msgspec.structs.replace(message, images=small, files=[]))
    return found


@lru_cache(maxsize=64)
def _thumbnail(image: bytes) -> str:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(image), formats=IMAGE_FORMATS) as opened:
        opened.draft("RGB", (SIDE, SIDE))
        small = ImageOps.exif_transpose(opened).convert("RGB")
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
