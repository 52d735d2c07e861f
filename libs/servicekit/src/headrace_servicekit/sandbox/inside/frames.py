"""What goes into the sandbox: a length of 4 bytes and a body, so that each process reads its own part of one pipe."""

from __future__ import annotations

import os
import struct

_LENGTH = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """`body` with its length ahead."""
    return _LENGTH.pack(len(body)) + body


def read_case(handle: int) -> bytes:
    """The next body, and nothing of what follows it; EOFError where there is none."""
    (size,) = _LENGTH.unpack(_exactly(handle, _LENGTH.size))
    return _exactly(handle, size)


def _exactly(handle: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (piece := os.read(handle, size - len(found))):
            raise EOFError
        found += piece
    return bytes(found)
