"""Files of prompts and messages, images, videos and sounds: what is read, what is refused, with reason and a way out.

Pillow and PyAV are extras of those who read them, imported when a file comes.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
from headrace_schema.clips import BadClip, check_clip
from headrace_schema.images import (
    IMAGE_FORMATS,
    MOST_IMAGE_BYTES,
    MOST_IMAGE_PIXELS,
    MOST_IMAGE_RATIO,
    NOUNS,
    Kind,
    kind_of,
    why_not_rgb,
)

_GZIP = b"\x1f\x8b"


class BadImage(ValueError):
    """What a file is, as it follows `what` ("an image"), and what to do."""

    def __init__(self, reason: str, fix: str, what: str = NOUNS["image"]) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix, self.what = reason, fix, what


def check_image(data: bytes) -> None:
    """Raises BadImage for what is no whole file, for one that is too large, and for an image that is not plainly RGB.

    Raises ImportError where Pillow, or PyAV for a video or a sound, is not installed.
    """
    from PIL import Image, UnidentifiedImageError

    kind = kind_of(data)
    if len(data) > MOST_IMAGE_BYTES:
        fix = "make it smaller, or write it as JPEG" if kind == "image" else "cut it, or make it smaller"
        raise BadImage(f"of more bytes than the {MOST_IMAGE_BYTES:,} that travel", fix, NOUNS[kind])
    if kind != "image":
        try:
            return check_clip(data)
        except BadClip as error:
            raise BadImage(error.reason, error.fix, NOUNS[kind]) from error
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_IMAGE_PIXELS:
                reason = f"of {width} x {height} pixels, and {MOST_IMAGE_PIXELS:,} are read"
                raise BadImage(reason, "make it smaller")
            if max(width, height) > MOST_IMAGE_RATIO * min(width, height):
                reason = f"of {width} x {height} pixels, which no model reads"
                raise BadImage(reason, f"keep its longer side below {MOST_IMAGE_RATIO} times the shorter one")
            image.load()
            if (why_not := why_not_rgb(image)) is not None:
                raise BadImage(*why_not)
            # What a camera adds behind the picture of an MPO is a preview of it.
            if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
                raise BadImage(f"of {frames} frames", "give one of them")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, BadImage):
            raise
        if data.startswith(_GZIP):
            raise BadImage("that is a gzip file", "unpack it (gunzip)") from error
        reason = f"that is broken ({' '.join(str(error).split())[:200]})"
        raise BadImage(reason, "write it anew as PNG or JPEG, or remove it") from error


def image_file(value: Any, kind: Kind = "image") -> bytes:
    """The checked file of a message: a file's bytes, `data:image/png;base64,…`, and of an image one of Pillow, or uint8
    numbers (height, width, 3). Raises BadImage, and ImportError without Pillow or PyAV.
    """
    data = file_of(value)
    if (own := kind_of(data)) != kind:
        raise BadImage(f"that is {NOUNS[own]} by its first bytes", f"give it as {own}", NOUNS[kind])
    check_image(data)
    return data


def png(image: Any) -> bytes:
    """An image of Pillow as a file."""
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def file_of(value: Any) -> bytes:
    """Like `image_file`, without its checks."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, str):
        head, comma, rest = value.partition(",")
        if not (head.startswith("data:") and comma and head.endswith(";base64")):
            reason = "that is no file here: a URL or a path is not opened"
            raise BadImage(reason, "give its bytes, or data:image/png;base64,…")
        try:
            return from_base64(rest)
        except (binascii.Error, ValueError) as error:
            raise BadImage("whose base64 is broken", "encode the file's bytes as base64") from error
    if hasattr(value, "getbands"):  # an image of Pillow
        return png(value)
    array = np.asarray(value)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size:
        from PIL import Image

        return png(Image.fromarray(array))
    kind = (
        f"{array.dtype} numbers of shape {array.shape}" if array.dtype.kind in "uif" else type(value).__name__
    )
    raise BadImage(f"that is {kind}", "give a file's bytes, an image of Pillow, or uint8 (height, width, 3)")


def from_base64(text: str) -> bytes:
    """The bytes of a base64 text, which may have lines, as MIME's has. Raises ValueError."""
    return base64.b64decode("".join(text.split()), validate=True)
