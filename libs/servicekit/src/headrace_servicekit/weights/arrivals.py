"""A version comes to a host once: one instance pulls it, the others of the host map it, other hosts read along.

A lock on a file in the directory that a host's instances share decides which one pulls; the kernel releases it when its
holder dies. Knows no source and no transport.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from headrace.common.v1 import common_pb2, weights_pb2

from headrace_servicekit.rpc.digests import RunningDigest
from headrace_servicekit.rpc.errors import ServiceError

if TYPE_CHECKING:
    from headrace_servicekit.weights.store import WeightStore

CHUNK_BYTES = 1024 * 1024
BEGIN_S = 5.0
"""How long a relay waits for a version to begin arriving."""
SIGN_S = 1.0
"""From a relay's last piece to its sign that it waits for its own source."""
STUCK_S = 45.0
"""A host's other instances take a version themselves when the one whose turn it is has got nothing for so long."""
_POLL_S = 0.02
_RECORD_BYTES = 64 * 1024


class Arrival:
    """A body that fills from its beginning; each tensor's digest is checked while its bytes are in the cache.

    What has arrived is read along by others, whose own digests find what is not the manifest's. `held` are tensors, by
    their place in the manifest, that are copied and not sent.
    """

    def __init__(
        self,
        whole: memoryview,
        entries: Sequence[common_pb2.WeightEntry],
        held: Mapping[int, memoryview] | None = None,
    ) -> None:
        self.entries = entries
        self.held = held or {}
        self.size = len(whole)
        self.offset = 0
        self.moved = 0
        """Bytes that were added, those that were wrong too."""
        self._whole = whole
        self._place = 0
        self._digest = RunningDigest()
        self._changed = asyncio.Event()
        self._ended = False

    def add(self, data: memoryview) -> None:
        """The next piece of what is not held. Raises ServiceError DIGEST_MISMATCH at a tensor's end."""
        self.moved += len(data)
        self._write(data)
        while self._place < len(self.entries):
            entry = self.entries[self._place]
            left = entry.offset_bytes + entry.size_bytes - (self.offset - len(data))
            self._digest.update(data[:left])
            if len(data) < left:
                return
            if self._digest.hexdigest() != entry.digest:
                raise ServiceError(
                    grpc.StatusCode.DATA_LOSS,
                    "DIGEST_MISMATCH",
                    f"tensor {entry.name}: the bytes are not those of the manifest",
                )
            data = data[left:]
            self._place, self._digest = self._place + 1, RunningDigest()

    async def copy_held(self) -> None:
        """The tensors that come next and are held: to be called before the first piece, and behind each."""
        while (own := self.held.get(self._place)) is not None:
            if self.offset != self.entries[self._place].offset_bytes:
                return  # half of it was sent
            self._place += 1
            for start in range(0, len(own), CHUNK_BYTES):
                self._write(own[start : start + CHUNK_BYTES])
                await asyncio.sleep(0)

    def rewind(self) -> None:
        """Goes back to the beginning of the tensor that is not whole: another source sends it again."""
        self.offset, self._digest = self.entries[self._place].offset_bytes, RunningDigest()

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

    def _write(self, data: memoryview) -> None:
        self._whole[self.offset : self.offset + len(data)] = data
        self.offset += len(data)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def lacking(
    entries: Sequence[common_pb2.WeightEntry], held: Iterable[int], offset: int = 0
) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of a body from `offset` on, without the tensors that are held, by their place.

    Raises ServiceError INVALID.
    """
    size = entries[-1].offset_bytes + entries[-1].size_bytes
    if offset > size:
        raise _invalid(f"offset {offset} is beyond the body's {size} bytes")
    found = []
    for place in sorted(held):
        if place >= len(entries):
            raise _invalid(f"held: tensor {place} of {len(entries)}")
        entry = entries[place]
        found.append((offset, entry.offset_bytes))
        offset = max(offset, entry.offset_bytes + entry.size_bytes)
    return [(begin, end) for begin, end in [*found, (offset, size)] if begin < end]


async def pieces(
    store: WeightStore, request: weights_pb2.FetchWeightsRequest
) -> AsyncIterator[tuple[int, bytes]]:
    """(offset, data) of what is asked for; of a relay also while it arrives, and b"" as a sign of life.

    Raises ServiceError NOT_FOUND, INVALID, and ELSEWHERE with the address of the host's instance that pulls it.
    """
    run, number = request.run, request.number
    if request.relay:
        await _begun(store, run, number)
    arrival = store.arriving(run, number) if request.relay else None
    stored = None
    entries = arrival.entries if arrival is not None else store.get(run, number).manifest.entries
    for offset, end in lacking(entries, request.held, request.offset_bytes):
        while offset < end:
            data = await arrival.read(offset) if arrival is not None else None
            if data is None:
                arrival, stored = None, stored or store.get(run, number)
                data = bytes(stored.body[offset : offset + CHUNK_BYTES])
            data = data[: end - offset]
            yield offset, data
            offset += len(data)


def _invalid(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


async def _begun(store: WeightStore, run: str, number: int) -> None:
    """Returns once the version is there or arrives, or after BEGIN_S. Raises ServiceError ELSEWHERE."""
    deadline = time.monotonic() + BEGIN_S
    while store.find(run, number) is None and store.arriving(run, number) is None:
        with suppress(OSError):
            holder = _record(store.turn_path(run, number).read_bytes())
            if holder.address and holder.incarnation != store.incarnation:
                raise ServiceError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "ELSEWHERE",
                    f"version {number} of {run} came to this host at {holder.address}",
                    address=holder.address,
                )
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(_POLL_S)


class Turn:
    """The right to bring a version to this host, or what another instance has brought."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def landed(self) -> common_pb2.WeightSource | None:
        """Where an instance of this host holds the version, as it said when it had it."""
        if self._handle < 0:
            return None
        source = _record(os.pread(self._handle, _RECORD_BYTES, 0))
        return source if source.shm_path else None

    def say(self, source: common_pb2.WeightSource) -> None:
        """Tells the others of this host who pulls it, and, with a path, where it is."""
        if self._handle >= 0:
            content = source.SerializeToString()
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, content, 0)

    def goes_on(self) -> None:
        """A sign that bytes still come."""
        if self._handle >= 0:
            os.utime(self._handle)


@asynccontextmanager
async def host_turn(store: WeightStore, run: str, number: int) -> AsyncIterator[Turn]:
    """Waits until nobody of this host pulls the version; one that got nothing for STUCK_S is not waited for."""
    path = store.turn_path(run, number)
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
                await asyncio.sleep(_POLL_S)
            with suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == os.stat(path).st_ino:
                    os.utime(handle)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # It was forgotten between the two.


def forget_turns(paths: Sequence[Path]) -> None:
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


def _record(content: bytes) -> common_pb2.WeightSource:
    try:
        return common_pb2.WeightSource.FromString(content)
    except DecodeError:  # It is being written.
        return common_pb2.WeightSource()
