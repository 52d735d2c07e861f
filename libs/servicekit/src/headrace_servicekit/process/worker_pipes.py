"""Frames of 4 bytes of little-endian length and a body, and the worker's end of the pipes that carry them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, TypeVar

from headrace_servicekit.process.confine import Confinement, confine
from headrace_servicekit.process.spawn import adopt_orphans, die_with_parent, forbid_signals_to_others

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
PARENT_VARIABLE = "HEADRACE_CHILD_PARENT"
MEMORY_VARIABLE = "HEADRACE_CHILD_MEMORY_BYTES"
CONFINED_VARIABLE = "HEADRACE_CHILD_CONFINED"
"""The `Confinement` of a worker with users' code, as JSON."""


Message = TypeVar("Message")


@dataclass(frozen=True)
class Codec(Generic[Message]):
    """Messages as the bodies of frames; `decode` raises ValueError where a body is no message."""

    encode: Callable[[Message], bytes]
    decode: Callable[[bytes], Message]


def frame(body: bytes) -> bytes:
    """`body` with its length ahead."""
    return LENGTH.pack(len(body)) + body


def checked_size(header: bytes, most: int = MAX_FRAME_BYTES) -> int:
    """Size of the body that follows; ValueError where it is over the limit or empty."""
    (size,) = LENGTH.unpack(header)
    if not 1 <= size <= most:
        raise ValueError(f"a frame of {size} bytes; 1 to {most} are allowed")
    return int(size)


# Messages may be megabytes; asyncio's own 64 KiB would take them in small bites.
BUFFER_BYTES = 4 * 1024 * 1024


@dataclass
class FrameReader:
    """The bodies of frames from a stream. What comes together costs one read."""

    stream: asyncio.StreamReader
    most: int = MAX_FRAME_BYTES
    """Largest body, in bytes."""
    ahead: bytearray = field(default_factory=bytearray)
    """What was read of bodies that are not taken yet."""

    async def next(self) -> bytes | None:
        """The next body; None at the end of the stream, where `ahead` is what a frame lacks the rest of.

        Raises ValueError for a length that is not allowed. Cancelled, it loses nothing.
        """
        while (body := self.taken()) is None:
            data = await self.stream.read(BUFFER_BYTES)
            if not data:
                return None
            self.ahead += data
        return body

    def taken(self) -> bytes | None:
        """The next body, if it has come whole; raises as `next`."""
        if len(self.ahead) < LENGTH.size:
            return None
        end = LENGTH.size + checked_size(bytes(self.ahead[: LENGTH.size]), self.most)
        if len(self.ahead) < end:
            return None
        body = bytes(self.ahead[LENGTH.size : end])
        del self.ahead[:end]
        return body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next body; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    size = checked_size(header)
    body = stream.read(size)
    return body if len(body) == size else None


def become_worker(*, trusted: bool = False) -> tuple[BinaryIO, BinaryIO]:
    """Called first in a worker: returns the protocol's two ends, out of reach of other people's code.

    What that code prints goes to stderr, and it reads nothing from stdin. The worker dies with its
    parent, writes no core file, and stays below its memory limit. One that is not `trusted` is confined, see
    `confine`, and can signal no process but its own where the kernel can forbid that. Raises NotConfined.
    """
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = int(os.environ.pop(MEMORY_VARIABLE, "0"))
    if memory:
        # Under a tighter limit of the user's (`ulimit -v`), that one holds: it cannot be raised.
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    confined = os.environ.pop(CONFINED_VARIABLE, "")
    if confined and not trusted:
        confine(Confinement(**json.loads(confined)))
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    adopt_orphans()
    if not trusted:
        forbid_signals_to_others()
    return os.fdopen(reader, "rb"), os.fdopen(writer, "wb")


JsonMessage = dict[str, Any]


def encode_json(message: JsonMessage) -> bytes:
    """A JSON object as the body of a frame; text of any kind comes through, lone surrogates too."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode_json(body: bytes) -> JsonMessage:
    """The JSON object of a frame's body; ValueError where it is none."""
    message = json.loads(body.decode("utf-8", "surrogatepass"))
    if not isinstance(message, dict):
        raise ValueError("a frame holds a JSON object")
    return message


def decode_reply(body: bytes) -> JsonMessage:
    """A worker's answer. Halves of surrogate pairs are replaced: no message, log or file of a service takes them."""
    text = body.decode("utf-8", "replace")
    message = decode_json(text.encode())
    if "\\ud" in text.lower():
        message = decode_json(encode_json(message).decode("utf-8", "replace").encode())
    return message


JSON_CODEC: Codec[JsonMessage] = Codec(encode_json, decode_reply)
