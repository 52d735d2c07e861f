"""What has changed between two bodies of one size, element by element; exact to the bit. Knows no transport.

An optimizer's step moves few bf16 elements, and most of them by their last bit: gaps and moves of a byte each, with
Huffman codes of their own, take a fiftieth of the body. Each stretch is coded by itself, so that coding, sending and
applying overlap.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from headrace.common.v1 import common_pb2, weights_pb2
from numpy.typing import NDArray

from headrace_servicekit.rpc.tensors import NUMPY_TYPES

PART_BYTES = 1 << 20
"""Bytes of one stretch: both stretches and their change stay in a core's cache."""
RESPONSE_BYTES = 4 << 20
"""Bytes of the body that one response covers."""
MOST_AHEAD = 8
"""Responses that are coded at the same time, each by a thread."""
ESCAPE = 255


class BadChange(ValueError):
    """A change that does not fit the body that it is of."""


@dataclass(frozen=True)
class Part:
    """A stretch of a body: elements of `width` bytes of one tensor."""

    offset: int
    size: int
    width: int
    same: bool
    """The tensor has one digest in both versions."""


def parts_of(
    manifest: common_pb2.WeightManifest, base: common_pb2.WeightManifest | None = None
) -> Iterator[Part]:
    """The stretches of a body, in order."""
    before = [] if base is None else base.entries
    known = {(e.name, e.offset_bytes, e.size_bytes): e.digest for e in before}
    for entry in manifest.entries:
        width = NUMPY_TYPES[entry.data_type].itemsize
        same = known.get((entry.name, entry.offset_bytes, entry.size_bytes)) == entry.digest
        for start in range(0, entry.size_bytes, PART_BYTES):
            size = min(PART_BYTES, entry.size_bytes - start)
            yield Part(entry.offset_bytes + start, size, width, same)


def encode(part: Part, new: memoryview, base: memoryview) -> weights_pb2.WeightChange:
    """The change of a stretch, of the bytes of both."""
    change = weights_pb2.WeightChange(offset_bytes=part.offset, size_bytes=part.size)
    if part.same:
        return change
    kind = np.dtype(f"<u{part.width}")
    after, before = np.frombuffer(new, kind), np.frombuffer(base, kind)
    places = np.flatnonzero(after != before)
    if not len(places):
        return change
    if 2 * len(places) < len(after):  # above it, no code is shorter than the bytes
        change.changed = len(places)
        change.gaps, change.large_gaps = _pack(np.diff(places, prepend=-1) - 1, np.dtype("<u4"))
        moved = after[places] - before[places]
        sign = moved >> kind.type(8 * part.width - 1)
        change.moves, change.large_moves = _pack((moved << kind.type(1)) ^ (kind.type(0) - sign), kind)
    streams = change.gaps, change.large_gaps, change.moves, change.large_moves
    if not change.changed or sum(map(len, streams)) > part.size:
        return weights_pb2.WeightChange(offset_bytes=part.offset, size_bytes=part.size, whole=bytes(new))
    return change


def apply(change: weights_pb2.WeightChange, width: int, base: memoryview, out: memoryview) -> None:
    """Writes into `out` what the stretch `base` becomes. Raises BadChange."""
    if change.whole:
        if len(change.whole) != len(out):
            raise BadChange(f"{len(change.whole)} bytes for a stretch of {len(out)}")
        out[:] = change.whole
        return
    out[:] = base
    if not change.changed:
        return
    kind = np.dtype(f"<u{width}")
    target = np.frombuffer(out, kind)
    if change.changed > len(target):
        raise BadChange(f"{change.changed} changes of {len(target)} elements")
    gaps = _unpack(change.gaps, change.large_gaps, change.changed, np.dtype("<u4")).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= len(target):
        raise BadChange(f"a change of element {places[-1]} of {len(target)}")
    coded = _unpack(change.moves, change.large_moves, change.changed, kind)
    target[places] += (coded >> kind.type(1)) ^ (kind.type(0) - (coded & kind.type(1)))


def _pack(numbers: NDArray[np.integer], large: np.dtype[np.unsignedinteger]) -> tuple[bytes, bytes]:
    beyond = numbers[numbers >= ESCAPE].astype(large)
    return _deflate(np.minimum(numbers, ESCAPE).astype(np.uint8)), _deflate(beyond) if len(beyond) else b""


def _unpack(
    small: bytes, large: bytes, count: int, kind: np.dtype[np.unsignedinteger]
) -> NDArray[np.unsignedinteger]:
    numbers = np.frombuffer(_inflate(small, count), np.uint8).astype(kind)
    beyond = numbers == ESCAPE
    if missing := int(np.count_nonzero(beyond)):
        numbers[beyond] = np.frombuffer(_inflate(large, missing * kind.itemsize), kind)
    return numbers


def _deflate(numbers: NDArray[np.unsignedinteger]) -> bytes:
    # Nothing repeats in noise: a search for repetitions takes twice the time and finds none.
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(numbers.tobytes()) + packer.flush()


def _inflate(data: bytes, size: int) -> bytes:
    try:
        found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error as error:
        raise BadChange(f"a stream that cannot be read: {error}") from error
    if len(found) != size:
        raise BadChange(f"a stream of other than {size} bytes")
    return found


@dataclass(eq=False)
class Changes:
    """What has changed in a version against another, in responses of one stretch after another.

    Coded when they are first asked for, and kept for others, but for those that are as long as the body.
    """

    new: common_pb2.WeightManifest
    body: memoryview
    base: memoryview | None
    """None where all responses came from elsewhere."""
    base_digest: str
    base_manifest: common_pb2.WeightManifest | None = None
    made: dict[int, weights_pb2.FetchWeightsResponse] = field(default_factory=dict)
    """By the offset at which they begin."""

    def __post_init__(self) -> None:
        parts = parts_of(self.new, self.base_manifest)
        covered = groupby(parts, key=lambda part: part.offset // RESPONSE_BYTES)
        groups = [list(group) for _, group in covered]
        self._groups = {group[0].offset: group for group in groups}
        self._coding: dict[int, asyncio.Task[weights_pb2.FetchWeightsResponse]] = {}
        self._ahead = max(1, min(MOST_AHEAD, len(os.sched_getaffinity(0))))

    @property
    def offsets(self) -> Sequence[int]:
        """Where a response begins."""
        return list(self._groups)

    async def response(self, offset: int) -> weights_pb2.FetchWeightsResponse:
        """The stretch that begins at an offset of `offsets`; a thread for each core codes the next ones."""
        if offset not in self.made:
            offsets = self.offsets
            first = offsets.index(offset)
            for following in offsets[first : first + self._ahead]:
                if following not in self.made and following not in self._coding:
                    coding = asyncio.to_thread(self._code, self._groups[following])
                    self._coding[following] = asyncio.create_task(coding)
            found = await asyncio.shield(self._coding[offset])
            self._coding.pop(offset, None)
            if 2 * found.ByteSize() > sum(part.size for part in self._groups[offset]):
                return found
            self.made[offset] = found
        return self.made[offset]

    def _code(self, group: Sequence[Part]) -> weights_pb2.FetchWeightsResponse:
        found = weights_pb2.FetchWeightsResponse()
        for part in group:
            stretch = slice(part.offset, part.offset + part.size)
            with self.body[stretch] as new:
                if self.base is None:
                    found.changes.add(offset_bytes=part.offset, size_bytes=part.size, whole=bytes(new))
                    continue
                with self.base[stretch] as base:
                    found.changes.append(encode(part, new, base))
        return found
