"""Images, videos and sounds of a row as files: paths, bytes, base64, and what `datasets` and Pillow have.

Each is decoded once, to be sure. Pillow is an extra, imported when a row has an image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_schema.images import (
    EXTRAS,
    MANY,
    MARKS,
    MOST_IMAGE_BYTES,
    MOST_IMAGES,
    MOST_PROMPT_IMAGE_BYTES,
    NOUNS,
    PARTS,
    Kind,
    kind_of,
)
from headrace_schema.problems import Impossible, choose, problem, show
from headrace_schema.references import is_closed
from headrace_servicekit.image_files import BadImage, check_image, from_base64, png

from headrace_coordinator.data.builtin.turns import is_conversation, part_text
from headrace_coordinator.data.builtin.values import BadRow, Row, file_of

COLUMNS: dict[Kind, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio"),
}
"""Columns that are files in data sets of others; the forms verl and trl read them without being told."""


@dataclass(frozen=True)
class Keys:
    """Keys of a row, which may be paths (`reward_model.ground_truth`); empty: those of the form."""

    question: str = ""
    answer: str = ""
    id: str = ""
    images: str = ""
    videos: str = ""
    audios: str = ""

    def of(self, kind: Kind) -> str:
        """The key of the files of that kind."""
        return str(getattr(self, COLUMNS[kind][0]))


def without_images(row: Row, form: str, keys: Keys, folder: Path | None) -> tuple[Row, list[bytes]]:
    """The row without its images, which no template and no scorer reads; parts of messages that are images are marks.

    Raises `BadRow`, also for images that nobody asked for.
    """
    nested = any(isinstance(value, (list, tuple)) for value in row.values())
    columns = dict[str, Kind]()
    taken = {keys.of(kind) for kind in COLUMNS} | {each for usual in COLUMNS.values() for each in usual}
    others = [each for each in row if each not in taken]
    for kind, usual in COLUMNS.items():
        named = keys.of(kind)
        key = named or next((each for each in (*usual, *others) if is_column(each, row.get(each), kind)), "")
        if key and not named and form not in ("verl", "trl"):
            reason = f"has {MANY[kind]} under {key!r}, which no option names"
            raise BadRow(reason, f"set data.options.{usual[0]}: {key}")
        if key and key not in row:
            raise BadRow(f"has no key {key!r}", choose(key, row, extra=f"or write null there: no {kind}"))
        if key:
            columns[key] = kind
    if not columns and not nested:
        return row, []
    images = [file for key, kind in columns.items() for file in images_of(row[key], key, folder, kind)]
    own: list[bytes] = []
    changed = {name: value for name, value in row.items() if name not in columns}
    for name, value in changed.items():
        if _has_image_parts(value):
            changed[name] = [_with_marks(turn, f"{name}[{at}]", folder, own) for at, turn in enumerate(value)]
    if own and images:
        under = " and ".join(map(repr, columns))
        reason = f"has images in its messages and under {under}"
        raise BadRow(reason, f"leave {under} out, or write parts of messages without images of their own")
    check_together(own or images)
    if not images and not own and any(map(_has_image_parts, row.values())):
        raise BadRow(
            "has parts of type image, and no image", "give each its image, or name data.options.images"
        )
    return changed, images or own


def _with_marks(turn: Row, place: str, folder: Path | None, images: list[bytes]) -> Row:
    """A message whose parts that are images are marks; what they hold is added to `images`."""
    parts = turn.get("content")
    if not isinstance(parts, (list, tuple)):
        return turn
    content = ""
    for at, part in enumerate(parts):
        if not _is_image_part(part):
            content += part_text(part, place)
            continue
        kind = PARTS[part["type"]]
        content += MARKS[kind]
        names = (*(name for name, own in PARTS.items() if own == kind), "url", "path")
        given = next((part[name] for name in names if part.get(name) is not None), None)
        if given is not None:  # else one of the row's own images
            images.append(image_of(given, f"{place}.content[{at}]", folder, kind))
    return {**turn, "content": content}


def _has_image_parts(value: Any) -> bool:
    """Whether it is a conversation some message of which has parts that are images."""
    return is_conversation(value) and any(
        isinstance(turn.get("content"), (list, tuple)) and any(map(_is_image_part, turn["content"]))
        for turn in value
    )


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def is_column(key: str, value: Any, kind: Kind = "image") -> bool:
    """Whether a column is images; of a name that says nothing, what `datasets` writes of files (`decoded_image`)."""
    if key in COLUMNS[kind]:
        return looks_like_image(value)
    if kind != "image":
        return False
    values = value if isinstance(value, (list, tuple)) else [value]
    return bool(values) and all(
        isinstance(each, Mapping) and set(each) == {"bytes", "path"} for each in values
    )


def looks_like_image(value: Any) -> bool:
    """Whether a value can be nothing but an image, or a list of them: no text."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(looks_like_image, value))
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= {"bytes", "path", *COLUMNS, "fps"}
    return isinstance(value, (bytes, bytearray)) or hasattr(value, "getbands")


def images_of(value: Any, key: str, folder: Path | None, kind: Kind = "image") -> list[bytes]:
    """The files of a value: an image, a list of them, or None for none. Paths are relative to `folder`.

    Raises `BadRow`.
    """
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if len(values) > MOST_IMAGES:
        raise BadRow(
            f"has {len(values)} {MANY[kind]} under {key!r}, and a prompt takes {MOST_IMAGES}",
            "leave some out",
        )
    found = [
        image_of(each, key if len(values) == 1 else f"{key}[{at}]", folder, kind)
        for at, each in enumerate(values)
    ]
    check_together(found)
    return found


def check_together(images: Sequence[bytes]) -> None:
    """Raises `BadRow` for images that one message does not carry."""
    if (size := sum(map(len, images))) > MOST_PROMPT_IMAGE_BYTES:
        reason = f"has {size:,} bytes of images, and a prompt takes {MOST_PROMPT_IMAGE_BYTES:,}"
        raise BadRow(reason, "make them smaller, or write them as JPEG")


def image_of(value: Any, key: str, folder: Path | None, kind: Kind = "image") -> bytes:
    """The file of an image, decoded once. Raises `BadRow`, naming `key`."""
    data = _bytes_of(value, key, folder, kind)
    _check(data, key, kind)
    return data


def _bytes_of(value: Any, key: str, folder: Path | None, kind: Kind) -> bytes:
    if isinstance(value, Mapping):  # of `datasets`, of verl, and a part of a message
        given = value.get("bytes")
        named = value.get("path") or value.get("url") or value.get("data") or value.get(kind)
        return _bytes_of(named if given is None else given, key, folder, kind)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if hasattr(value, "getbands"):  # an image of Pillow
        return png(value)
    if not isinstance(value, str) or not value:
        raise BadRow(f"has {show(value)} as {kind} {key!r}", "give a path, base64 or bytes")
    if value.startswith(("http://", "https://")):
        raise BadRow(f"has a URL as {kind} {key!r}", "download it, and give its path")
    head, comma, rest = value.partition(",")
    if value.startswith("data:") and comma and head.endswith(";base64"):
        return _from_base64(rest, key, kind)
    path = Path(os.path.expanduser(value.removeprefix("file://")))
    path = path if path.is_absolute() or folder is None else folder / path
    if is_closed(path):  # a row names what its spec may not
        raise BadRow(
            f"has {NOUNS[kind]} {key!r} that is the fleet's own: {path}", "copy it to a folder of yours"
        )
    try:
        with file_of(path).open("rb") as file:
            return file.read(MOST_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        if len(value) > 256 or "." not in value:
            return _from_base64(value, key, kind)
        why = getattr(error, "strerror", None) or error
        raise BadRow(
            f"has {NOUNS[kind]} {key!r} that cannot be read: {path}: {why}",
            "name a file that the coordinator's host has; paths are relative to the file of the rows",
        ) from error


def _from_base64(text: str, key: str, kind: Kind) -> bytes:
    try:
        return from_base64(text)
    except ValueError as error:
        shown = text if len(text) <= 60 else f"{text[:57]}…"
        reason = f"has {shown!r} as {kind} {key!r}, which is no file here and no base64"
        raise BadRow(reason, "give a path that the coordinator's host has, or base64") from error


def _check(data: bytes, key: str, kind: Kind) -> None:
    """Raises `BadRow` for what is no file of that kind, or one that is not read."""
    try:
        check_image(data)
    except ImportError as error:
        reason = f"{MANY[kind]} need a package that is not installed ({error})"
        fix = f"pip install 'headrace-coordinator[{EXTRAS[kind]}]'"
        raise Impossible([problem(f"data.options.{COLUMNS[kind][0]}", reason, fix)]) from error
    except BadImage as error:
        raise BadRow(f"has {error.what} {key!r} {error.reason}", error.fix) from error
    if kind_of(data) != kind:
        fix = f"give {NOUNS[kind]}, or name it under data.options.{COLUMNS[kind_of(data)][0]}"
        raise BadRow(f"has {NOUNS[kind_of(data)]} as {kind} {key!r}", fix)
