"""A body that arrives, and whose turn it is on a host to have it sent: one instance pulls it, and the others map it.

A lock on a file in the directory that a host's instances share decides which one pulls; the kernel releases it when its
holder dies. Knows no source and no transport.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from headrace.common.v1 import common_pb2, weights_pb2

from headrace_servicekit.rpc.digests import digest_stretch, in_threads, joined_digest, stretches
from headrace_servicekit.rpc.errors import invalid
from headrace_servicekit.rpc.tensors import NUMPY_TYPES
from headrace_servicekit.weights.delta import BadChange, apply
from headrace_servicekit.weights.versions import StoredWeights, check_digest, mismatch

CHUNK_BYTES = 1024 * 1024
COPIED_BYTES = 32 * CHUNK_BYTES
SIGN_S = 1.0
"""From a relay's last piece to its sign that it waits for its own source."""
STUCK_S = 45.0
"""A host's other instances take a version themselves when the one whose turn it is has got nothing for so long."""
POLL_S = 0.02
_RECORD_BYTES = 64 * 1024
_DIGEST_BYTES = 32
"""Of a record's beginning."""


class Arrival:
    """A body that fills from its beginning, by bytes or by changes of `base`; each tensor's digest is checked while its
    bytes are in the cache.

    What has arrived is read along by others, whose own digests find what is not the manifest's. `held` are tensors, by
    their place in the manifest, that are copied and not sent.
    """

    def __init__(
        self, whole: memoryview, entries: Sequence[common_pb2.WeightEntry], held: Mapping[int, memoryview]
    ) -> None:
        self.entries, self.held = entries, held
        self.size = len(whole)
        self.offset = 0
        self.moved = 0
        """Bytes that were sent, those that were wrong too."""
        self.base: StoredWeights | None = None
        self.changes: dict[int, weights_pb2.FetchWeightsResponse] = {}
        """Changes of `base`, by the offset at which they begin."""
        self._whole = whole
        self._place = 0
        self._parts: list[bytes] = []
        """Digests of the stretches that have come of the tensor that is not whole."""
        self._changed = asyncio.Event()
        self._ended = False

    def restart(self, base: StoredWeights) -> None:
        """Begins anew, by changes of another version."""
        self.base, self.changes = base, {}
        self.offset = self.moved = self._place = 0
        self._parts = []

    def rewind(self) -> None:
        """Goes back to the beginning of the tensor that is not whole: another source sends it again."""
        self.offset, self._parts = self.entries[self._place].offset_bytes, []

    async def add(self, data: memoryview) -> None:
        """The next piece of what is not held, a large one in several threads. Raises ServiceError DIGEST_MISMATCH at a
        tensor's end.
        """
        self.moved += len(data)
        if len(data) > CHUNK_BYTES:
            await _to_the_end(lambda: self._take(data))
        else:
            self._take(data)
        self._tell()
        await self.copy_held()

    async def change(self, response: weights_pb2.FetchWeightsResponse) -> None:
        """The next changes. Raises ServiceError DIGEST_MISMATCH, naming the tensor."""
        self.moved += response.ByteSize()
        self.changes[self.offset] = response
        try:
            await _to_the_end(lambda: self._change(response.changes))
        except BadChange as error:
            raise mismatch(str(error)) from error
        self._tell()

    async def copy_held(self) -> None:
        """Copies the tensors that come next and are held: to be called before the first piece."""
        while (own := self.held.get(self._place)) is not None:
            if self.offset != self.entries[self._place].offset_bytes:
                return  # half of it was sent
            self._place += 1
            for start in range(0, len(own), COPIED_BYTES):
                piece = own[start : start + COPIED_BYTES]
                await _to_the_end(partial(self._write, piece))
                self._tell()

    def end(self) -> None:
        """No more comes: it is published, or has failed. Releases the view of the memory."""
        self._ended = True
        self._whole.release()
        self._tell()

    async def read(self, offset: int) -> bytes | None:
        """What has arrived from `offset` on, at most CHUNK_BYTES; b"" after SIGN_S without a byte, None at its end."""
        until = time.monotonic() + SIGN_S
        while not self._ended and self.offset <= offset:
            changed = self._changed
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                return b""
        if self._ended:
            return None
        return bytes(self._whole[offset : min(self.offset, offset + CHUNK_BYTES)])

    def _take(self, data: memoryview) -> None:
        self._write(data)
        self._check()

    def _write(self, data: memoryview) -> None:
        if data:
            to, of = (np.frombuffer(each, np.uint8) for each in (self._whole[self.offset :], data))
            in_threads([partial(_copy, to, of, *stretch) for stretch in stretches(len(data))])
        self.offset += len(data)

    def _change(self, changes: Iterable[weights_pb2.WeightChange]) -> None:
        assert self.base is not None
        self._check()  # tensors without elements have no change
        for change in changes:
            size = change.size_bytes
            entry = self.entries[min(self._place, len(self.entries) - 1)]
            stretch = slice(self.offset, self.offset + size)
            if (
                change.offset_bytes != self.offset
                or not size
                or stretch.stop > entry.offset_bytes + entry.size_bytes
            ):
                raise BadChange(
                    f"a change of {size} bytes at {change.offset_bytes}, expected one at {self.offset}"
                )
            with self._whole[stretch] as out, self.base.body[stretch] as before:
                apply(change, NUMPY_TYPES[entry.data_type].itemsize, before, out)
                self.offset = stretch.stop
                self._check()

    def _check(self) -> None:
        """Takes the digests of all stretches before `offset`; compares that of each tensor that is whole."""
        acts, whole, place = [], list[tuple[common_pb2.WeightEntry, list[bytes]]](), self._place
        parts = self._parts
        while place < len(self.entries):
            entry = self.entries[place]
            bounds = [
                (entry.offset_bytes + a, entry.offset_bytes + b) for a, b in stretches(entry.size_bytes)
            ]
            for begin, end in bounds[len(parts) :]:
                if end > self.offset:
                    break
                acts.append(partial(self._digest, begin, end, parts, len(parts)))
                parts.append(b"")
            if len(parts) < len(bounds) or entry.offset_bytes > self.offset:
                break
            whole.append((entry, parts))
            place, parts = place + 1, []
        in_threads(acts)
        for entry, found in whole:
            check_digest(entry, joined_digest(found))
            self._place, self._parts = self._place + 1, []
        self._parts = parts

    def _digest(self, begin: int, end: int, parts: list[bytes], place: int) -> None:
        with self._whole[begin:end] as own:
            parts[place] = digest_stretch(own)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _to_the_end(act: Callable[[], None]) -> None:
    """Does it in a thread, to its end whatever becomes of the caller: it would write into what another way brings."""
    doing = asyncio.ensure_future(asyncio.to_thread(act))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        raise


def _copy(to: np.ndarray, of: np.ndarray, begin: int, end: int) -> None:
    to[begin:end] = of[begin:end]


def lacking(
    entries: Sequence[common_pb2.WeightEntry], held: Iterable[int], offset: int = 0
) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of a body from `offset` on, without the tensors that are held, by their place.

    Raises ServiceError INVALID.
    """
    size = entries[-1].offset_bytes + entries[-1].size_bytes
    if offset > size:
        raise invalid(f"offset {offset} is beyond the body's {size} bytes")
    found = []
    for place in sorted(held):
        if place >= len(entries):
            raise invalid(f"held: tensor {place} of {len(entries)}")
        entry = entries[place]
        found.append((offset, entry.offset_bytes))
        offset = max(offset, entry.offset_bytes + entry.size_bytes)
    return [(begin, end) for begin, end in [*found, (offset, size)] if begin < end]


class Turn:
    """The right to bring a version to this host, or what another instance has brought; of no file, -1."""

    def __init__(self, handle: int = -1) -> None:
        self._handle = handle

    def landed(self, digest: str) -> common_pb2.WeightSource | None:
        """Where an instance of this host holds the version of this digest, verified, as it said when it had it."""
        if self._handle < 0:
            return None
        content = os.pread(self._handle, _RECORD_BYTES, 0)
        source = _record(content)
        return source if source.shm_path and content[:_DIGEST_BYTES] == _of(digest) else None

    def say(self, source: common_pb2.WeightSource, digest: str) -> None:
        """Tells the others of this host who pulls the version of this digest, and, with a path, where it is."""
        if self._handle >= 0:
            content = _of(digest) + source.SerializeToString()
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, content, 0)

    def goes_on(self) -> None:
        """A sign that bytes still come."""
        if self._handle >= 0:
            os.utime(self._handle)


def holder_of(path: Path) -> common_pb2.WeightSource:
    """What the holder of a turn said of itself; empty where nobody pulls the version."""
    try:
        return _record(path.read_bytes())
    except OSError:
        return common_pb2.WeightSource()


@asynccontextmanager
async def host_turn(path: Path) -> AsyncIterator[Turn]:
    """Waits until nobody of this host pulls the version; one that got nothing for STUCK_S is not waited for."""
    handle = await _locked(path)
    try:
        yield Turn(handle)
    finally:
        if handle >= 0:
            os.close(handle)


async def _locked(path: Path) -> int:
    """The file, locked; -1 when its holder is stuck, or there can be no such file."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return -1
        try:
            while not _try_lock(handle):
                if time.time() - os.fstat(handle).st_mtime > STUCK_S:
                    os.close(handle)
                    return -1
                await asyncio.sleep(POLL_S)
            with suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == os.stat(path).st_ino:
                    os.utime(handle)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # It was forgotten between the two.


def forget_turns(paths: Iterable[Path]) -> None:
    """Removes the files of versions that nobody pulls any more."""
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if _try_lock(handle):
                path.unlink(missing_ok=True)
            os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _of(digest: str) -> bytes:
    return digest.encode()[:_DIGEST_BYTES].ljust(_DIGEST_BYTES)


def _record(content: bytes) -> common_pb2.WeightSource:
    try:
        return common_pb2.WeightSource.FromString(content[_DIGEST_BYTES:])
    except DecodeError:  # It is being written.
        return common_pb2.WeightSource()
