"""Images, videos and sounds in prompts: where one stands, which models read them, how large they may be.

Where nothing else is said, "image" is each of the three: a file, whose kind is told by its first bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["image", "video", "audio"]
_SEEN: tuple[Kind, ...] = ("image", "video")
READS: MappingProxyType[str, tuple[Kind, ...]] = MappingProxyType(
    {
        "qwen2_5_vl": _SEEN,
        "qwen3_vl": _SEEN,
        "qwen3_vl_moe": _SEEN,
        "qwen3_5": _SEEN,
        "qwen3_5_moe": _SEEN,
        "gemma3": ("image",),
        "gemma4": (*_SEEN, "audio"),
        "internvl": _SEEN,
        "glm4v": _SEEN,
        "glm4v_moe": _SEEN,
        "glm46v": _SEEN,
        "qwen2_5_omni_thinker": (*_SEEN, "audio"),
        "qwen3_omni_moe_thinker": (*_SEEN, "audio"),
    }
)
"""What prompts may have, by the model_type of models that read more than text."""
VISION_FAMILIES = tuple(READS)
"""Which all read images."""
MARKS: MappingProxyType[Kind, str] = MappingProxyType(
    {"image": "<image>", "video": "<video>", "audio": "<audio>"}
)
"""Stand in a prompt where one of its files belongs; in a prompt without files of that kind they are plain text."""
_KIND_OF_MARK: dict[str, Kind] = {mark: kind for kind, mark in MARKS.items()}
PARTS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "image": "image",
        "image_url": "image",
        "input_image": "image",
        "video": "video",
        "video_url": "video",
        "audio": "audio",
        "audio_url": "audio",
        "input_audio": "audio",
    }
)
"""Types of the parts of a message that are files."""
NOUNS: MappingProxyType[Kind, str] = MappingProxyType(
    {"image": "an image", "video": "a video", "audio": "a sound"}
)
MANY: MappingProxyType[Kind, str] = MappingProxyType(
    {"image": "images", "video": "videos", "audio": "sounds"}
)
EXTRAS: MappingProxyType[Kind, str] = MappingProxyType(
    {"image": "vision", "video": "media", "audio": "media"}
)
"""Of a distribution, which brings what reads such files."""
MOST_IMAGES = 32
"""Of one prompt, or one conversation."""
MOST_IMAGE_BYTES = 8 << 20
"""Of one image file."""
MOST_PROMPT_IMAGE_BYTES = 16 << 20
"""Of all image files of a prompt, or of a conversation, which travel in one message."""
MOST_GROUP_IMAGE_BYTES = 48 << 20
"""Of all image files of a group's conversations, which travel in one message to the trainer."""
MOST_IMAGE_PIXELS = 64_000_000
"""Width times height of one image: what is decoded before a processor makes it smaller."""
MOST_IMAGE_RATIO = 200
"""Longer side over shorter side."""
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Of image files, by Pillow's names: what is read. Others reach for programs of the machine (EPS: Ghostscript)."""
_STILL = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
"""Brands of images in MP4's container."""
_PLAIN_MODES = ("1", "L", "P", "RGB")
"""Of Pillow: what becomes RGB without a choice, where nothing is transparent; others have more bits, or an alpha."""
_ON_WHITE = (
    'Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")'
)


def kind_of(data: bytes) -> Kind:
    """What a file is by its first bytes: MP4, MOV, MKV and WebM are videos; WAV, FLAC, MP3, Ogg and M4A sounds; else an
    image.
    """
    if data[4:8] == b"ftyp":
        return "audio" if data[8:11] in (b"M4A", b"M4B") else "video" if data[8:12] not in _STILL else "image"
    if data.startswith(b"\x1a\x45\xdf\xa3") or (data.startswith(b"RIFF") and data[8:12] == b"AVI "):
        return "video"
    mp3 = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # of layer III
    wav = data.startswith(b"RIFF") and data[8:12] == b"WAVE"
    return "audio" if mp3 or wav or data.startswith((b"fLaC", b"OggS", b"ID3")) else "image"


def marks_in(text: str, kinds: Collection[str]) -> list[Kind]:
    """The kinds of the marks in a text whose files are of these kinds, in order."""
    return [_KIND_OF_MARK[each] for each in _pattern(kinds).findall(text)] if kinds else []


def pieces_of(text: str, kinds: Collection[str]) -> list[tuple[str, Kind | None]]:
    """A text as (text before, kind of the mark behind it), and at last what is behind all marks with None."""
    if not kinds:
        return [(text, None)]
    parts = _pattern(kinds).split(text)
    marks = [_KIND_OF_MARK[mark] for mark in parts[1::2]]
    return list(zip(parts[::2], [*marks, None], strict=True))


def marks_of(files: Iterable[bytes]) -> str:
    """A mark for each file, one behind the other."""
    return "".join(MARKS[kind_of(data)] for data in files)


def in_order(files: Iterable[bytes], marks: Iterable[Kind]) -> list[bytes]:
    """Files in the order of their marks, of which there is one for each."""
    left: dict[Kind, list[bytes]] = {}
    for data in files:
        left.setdefault(kind_of(data), []).append(data)
    return [left[kind].pop(0) for kind in marks]


def counted(kinds: Iterable[Kind]) -> str:
    """Kinds of files for people: "2 images and 1 videos"."""
    numbers = Counter(kinds)
    return " and ".join(f"{numbers[kind]} {MANY[kind]}" for kind in MANY if numbers[kind]) or "no images"


def _pattern(kinds: Collection[str]) -> re.Pattern[str]:
    return re.compile(f"(<(?:{'|'.join(kind for kind in MARKS if kind in kinds)})>)")


def why_not_rgb(image: Any) -> tuple[str, str] | None:
    """Why an image of Pillow does not say what it looks like in RGB, and what to do; None where it does.

    What is transparent may be an alpha channel, a colour, or colours of a palette.
    """
    if image.has_transparency_data:
        if image.convert("RGBA").getextrema()[3] == (255, 255):
            return None
        reason = f"of mode {image.mode} with transparent parts, which does not say what is behind them"
        return reason, f"put it on a background: {_ON_WHITE}"
    if image.mode in _PLAIN_MODES:
        return None
    return (
        f"of mode {image.mode}, which does not say what it looks like in RGB",
        'convert it: image.convert("RGB")',
    )
