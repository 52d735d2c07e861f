"""Frames over pipes: 4 bytes of little-endian length, then JSON. Both ends; knows nothing of scorers."""

from __future__ import annotations

import json
import os
import resource
import struct
from typing import Any, BinaryIO

from headrace_servicekit.process import die_with_parent

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
PARENT_VARIABLE = "HEADRACE_CHILD_PARENT"
MEMORY_VARIABLE = "HEADRACE_CHILD_MEMORY_BYTES"


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message of a frame's body; ValueError where it is no JSON object."""
    message = json.loads(body.decode("utf-8", "surrogatepass"))
    if not isinstance(message, dict):
        raise ValueError("a frame holds a JSON object")
    return message


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    body = stream.read(size)
    return decode(body) if len(body) == size else None


def become_child() -> tuple[BinaryIO, BinaryIO]:
    """Called first in a child: returns the protocol's two ends, out of reach of other people's code.

    What that code prints goes to stderr, and it reads nothing from stdin. The child dies with its
    parent, writes no core file, and stays below its memory limit.
    """
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = int(os.environ.pop(MEMORY_VARIABLE, "0"))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    return os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
