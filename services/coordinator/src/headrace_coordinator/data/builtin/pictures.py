"""Images of a row as files: paths, bytes, base64, and what `datasets` and Pillow have.

Each is decoded once, to be sure. Knows no prompt. Pillow is an extra, imported when a row has an image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_schema.images import MOST_IMAGE_BYTES, MOST_IMAGES, MOST_PROMPT_IMAGE_BYTES
from headrace_schema.problems import Impossible, problem, show
from headrace_schema.references import is_closed
from headrace_servicekit.image_files import BadImage, check_image, from_base64, png

from headrace_coordinator.data.builtin.values import BadRow, file_of

IMAGE_KEYS = ("images", "image")
"""Columns that are images in data sets of others; the forms verl and trl read them without being told."""


def is_column(key: str, value: Any) -> bool:
    """Whether a column is images; of a name that says nothing, what `datasets` writes of files (`decoded_image`)."""
    if key in IMAGE_KEYS:
        return looks_like_image(value)
    values = value if isinstance(value, (list, tuple)) else [value]
    return bool(values) and all(
        isinstance(each, Mapping) and set(each) == {"bytes", "path"} for each in values
    )


def looks_like_image(value: Any) -> bool:
    """Whether a value can be nothing but an image, or a list of them: no text."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(looks_like_image, value))
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= {"bytes", "path"}
    return isinstance(value, (bytes, bytearray)) or hasattr(value, "getbands")


def images_of(value: Any, key: str, folder: Path | None) -> list[bytes]:
    """The files of a value: an image, a list of them, or None for none. Paths are relative to `folder`.

    Raises `BadRow`.
    """
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if len(values) > MOST_IMAGES:
        raise BadRow(
            f"has {len(values)} images under {key!r}, and a prompt takes {MOST_IMAGES}", "leave some out"
        )
    found = [
        image_of(each, key if len(values) == 1 else f"{key}[{at}]", folder) for at, each in enumerate(values)
    ]
    check_together(found)
    return found


def check_together(images: Sequence[bytes]) -> None:
    """Raises `BadRow` for images that one message does not carry."""
    if (size := sum(map(len, images))) > MOST_PROMPT_IMAGE_BYTES:
        reason = f"has {size:,} bytes of images, and a prompt takes {MOST_PROMPT_IMAGE_BYTES:,}"
        raise BadRow(reason, "make them smaller, or write them as JPEG")


def image_of(value: Any, key: str, folder: Path | None) -> bytes:
    """The file of an image, decoded once. Raises `BadRow`, naming `key`."""
    data = _bytes_of(value, key, folder)
    _check(data, key)
    return data


def _bytes_of(value: Any, key: str, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):  # of `datasets`, and a part of a message
        given = value.get("bytes")
        return _bytes_of(value.get("path") or value.get("url") if given is None else given, key, folder)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if hasattr(value, "getbands"):  # an image of Pillow
        return png(value)
    if not isinstance(value, str) or not value:
        raise BadRow(f"has {show(value)} as image {key!r}", "give a path, base64 or bytes")
    if value.startswith(("http://", "https://")):
        raise BadRow(f"has a URL as image {key!r}", "download it, and give its path")
    head, comma, rest = value.partition(",")
    if value.startswith("data:") and comma and head.endswith(";base64"):
        return _from_base64(rest, key)
    path = Path(os.path.expanduser(value.removeprefix("file://")))
    path = path if path.is_absolute() or folder is None else folder / path
    if is_closed(path):  # a row names what its spec may not
        raise BadRow(f"has an image {key!r} that is the fleet's own: {path}", "copy it to a folder of yours")
    try:
        with file_of(path).open("rb") as file:
            return file.read(MOST_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        if len(value) > 256 or "." not in value:
            return _from_base64(value, key)
        why = getattr(error, "strerror", None) or error
        raise BadRow(
            f"has an image {key!r} that cannot be read: {path}: {why}",
            "name a file that the coordinator's host has; paths are relative to the file of the rows",
        ) from error


def _from_base64(text: str, key: str) -> bytes:
    try:
        return from_base64(text)
    except ValueError as error:
        shown = text if len(text) <= 60 else f"{text[:57]}…"
        reason = f"has {shown!r} as image {key!r}, which is no file here and no base64"
        raise BadRow(reason, "give a path that the coordinator's host has, or base64") from error


def _check(data: bytes, key: str) -> None:
    """Raises `BadRow` for what is no image that is read."""
    try:
        check_image(data)
    except ImportError as error:
        reason = f"images need a package that is not installed ({error})"
        fix = "pip install 'headrace-coordinator[vision]'"
        raise Impossible([problem("data.options.images", reason, fix)]) from error
    except BadImage as error:
        raise BadRow(f"has an image {key!r} {error.reason}", error.fix) from error
