"""Frames over pipes: 4 bytes of little-endian length, 1 byte of kind, payload. Knows no environment."""

from __future__ import annotations

import os
import resource
import struct
from enum import IntEnum
from typing import BinaryIO

from headrace_servicekit.process import die_with_parent

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
PARENT_VARIABLE = "HEADRACE_CHILD_PARENT"


class Kind(IntEnum):
    """What a frame's payload is."""

    CATALOGUE = 1
    """Asked with nothing, answered with JSON [[backend, name], …]."""
    OPEN = 2
    """Asked with JSON {backend, name, options, own_time_limit, environments: [index]}, answered with an
    OpenPoolResponse that holds the spaces."""
    OPERATE = 3
    """Asked with an EnvironmentOperation, answered with an EnvironmentOutcome."""
    RENDER = 4
    """Asked with JSON {environment: index}, answered with a Tensor."""
    FAULT = 5
    """Answer with JSON {field, message}, where an OPEN or a RENDER failed."""


def encode(kind: Kind, payload: bytes) -> bytes:
    """One frame."""
    return LENGTH.pack(1 + len(payload)) + bytes([kind]) + payload


def decode(body: bytes) -> tuple[Kind, bytes]:
    """Kind and payload of a frame's body; ValueError where there is no such kind."""
    return Kind(body[0]), body[1:]


def checked_size(header: bytes) -> int:
    """Size of the body that follows; ValueError where it is over the limit or empty."""
    (size,) = LENGTH.unpack(header)
    if not 1 <= size <= MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes; 1 to {MAX_FRAME_BYTES} are allowed")
    return int(size)


def read_frame(stream: BinaryIO) -> tuple[Kind, bytes] | None:
    """The next frame; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    size = checked_size(header)
    body = stream.read(size)
    return decode(body) if len(body) == size else None


def become_child() -> tuple[BinaryIO, BinaryIO]:
    """Called first in a child: returns the protocol's two ends, out of reach of other people's code.

    What that code prints goes to stderr, and it reads nothing from stdin. The child dies with its
    parent and writes no core file.
    """
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    return os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
