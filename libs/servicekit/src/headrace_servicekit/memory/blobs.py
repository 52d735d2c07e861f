"""Bodies by reference: kept by their producer, read by those that have the reference, verified by digest.

On the producer's host the reader opens the file on the shared tmpfs, elsewhere it asks the producer by gRPC. Knows
nothing of what a body means or of when its retention ends.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import grpc.aio
from headrace.common.v1 import blobs_pb2, blobs_pb2_grpc, common_pb2

from headrace_servicekit.folders import open_below, read_below
from headrace_servicekit.memory.segments import raise_no_space
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.requests import invalid

CHUNK_BYTES = 1024 * 1024
HELD_SHARE = 0.5
"""Largest share of the tmpfs' room that `hold` fills with files; published weights lie there too."""
SPARE_BYTES = 64 * 1024 * 1024
"""Size of the files of released blobs that are kept for reuse by blobs of the same size, in bytes."""
LARGE_BYTES = 4 * 1024 * 1024
"""Above it a blob is read and hashed in a thread: the event loop goes on meanwhile."""
FETCH_S, SLOW = 60.0, 10e6
"""Seconds that a producer has to send a blob, and the bytes for which it gets one more."""
_FOLDER = "blobs"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class BlobStore:
    """The blobs of one incarnation, as files below its locked directory, where the janitor finds them.

    `directory` is the weight store's, SHM_DIR/INCARNATION; `address` (host:port) is where a BlobServicer serves.
    """

    def __init__(self, directory: Path, address: str = "") -> None:
        self.address = address
        self._incarnation = directory.name
        self._folder = directory / _FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._kept: dict[str, common_pb2.BlobRef] = {}
        self._in_memory: dict[str, bytes] = {}
        self._adopted: set[str] = set()
        self._filed_bytes = 0
        self._spare: dict[int, list[Path]] = defaultdict(list)
        self._spare_bytes = 0
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def folder(self) -> Path:
        """Where the files are: a BlobWriter of another process of this host writes there."""
        return self._folder

    def put(self, data: bytes | bytearray | memoryview) -> common_pb2.BlobRef:
        """Keeps a copy of `data` until `release`. Raises ServiceError NO_SPACE when the tmpfs is full."""
        self._last += 1
        self._file(name := str(self._last), data)
        return self._keep(name, data)

    def hold(self, data: bytes | bytearray | memoryview) -> common_pb2.BlobRef:
        """As `put`; in memory, from which it is served by gRPC alone, where files have HELD_SHARE of the room."""
        self._last += 1
        name, size = str(self._last), memoryview(data).nbytes
        try:
            room = shutil.disk_usage(self._folder).free + self._filed_bytes
            if self._filed_bytes + size > HELD_SHARE * room:
                raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE", "its share is taken")
            self._file(name, data)
        except ServiceError:
            self._in_memory[name] = bytes(data)
        return self._keep(name, data)

    def adopt(self, written: common_pb2.BlobRef) -> common_pb2.BlobRef:
        """Keeps what a BlobWriter has written. `release` leaves the file to its writer. Raises ServiceError INVALID."""
        if not _NAME.fullmatch(written.blob_id):
            raise invalid("blob_id", f"{written.blob_id!r} names no file")
        reference = common_pb2.BlobRef(producer_address=self.address, incarnation=self._incarnation)
        reference.MergeFrom(written)
        self._adopted.add(written.blob_id)
        self._kept[written.blob_id] = reference
        return reference

    def forget(self, prefix: str) -> None:
        """Removes the files of writers whose names begin so."""
        for name in [each for each in self._adopted if each.startswith(prefix)]:
            self._adopted.discard(name)
            self._kept.pop(name, None)
        for path in self._folder.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    def _keep(self, name: str, data: bytes | bytearray | memoryview) -> common_pb2.BlobRef:
        reference = self._kept[name] = common_pb2.BlobRef(
            producer_address=self.address,
            incarnation=self._incarnation,
            blob_id=name,
            size_bytes=memoryview(data).nbytes,
            digest=digest_bytes(data),
        )
        return reference

    def _file(self, name: str, data: bytes | bytearray | memoryview) -> None:
        size = memoryview(data).nbytes
        path = self._folder / name
        if self._spare[size]:
            self._spare[size].pop().rename(path)
            self._spare_bytes -= size
        try:
            _write(path, data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise_no_space(error, self._folder, size)
        self._filed_bytes += size

    def open(self, reference: common_pb2.BlobRef) -> BinaryIO:
        """A kept blob to be read. Raises ServiceError BLOB_GONE."""
        kept = self._kept.get(reference.blob_id)
        if kept is None or reference.incarnation != self._incarnation:
            raise _gone(reference, "it is not kept here (any more)")
        if (data := self._in_memory.get(kept.blob_id)) is not None:
            return io.BytesIO(data)
        try:  # Users' code writes in this folder too.
            return read_below(self._folder, self._folder / kept.blob_id)
        except OSError as error:
            raise _gone(reference, f"its file cannot be read: {error.strerror}") from error

    def size(self, reference: common_pb2.BlobRef) -> int:
        """Bytes of a kept blob; 0 for none."""
        kept = self._kept.get(reference.blob_id)
        return kept.size_bytes if kept is not None else 0

    def release(self, reference: common_pb2.BlobRef) -> None:
        """Drops a blob. Whoever still reads it gets its bytes or a DIGEST_MISMATCH. Repeated calls do nothing."""
        kept = self._kept.pop(reference.blob_id, None)
        if (
            kept is None
            or self._in_memory.pop(kept.blob_id, None) is not None
            or kept.blob_id in self._adopted
        ):
            return
        path, size = self._folder / kept.blob_id, kept.size_bytes
        self._filed_bytes -= size
        if self._spare_bytes + size > SPARE_BYTES:
            path.unlink(missing_ok=True)
            return
        spare = path.with_name(f"spare-{kept.blob_id}")
        path.rename(spare)
        self._spare[size].append(spare)
        self._spare_bytes += size


class BlobWriter:
    """Writes bodies into a store's folder from another process of the host; the store adopts them.

    Each name has two files, which are mapped and written in turn: a body stays until the one after the next is put.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._mapped: dict[str, mmap.mmap] = {}
        self._turn: dict[str, int] = {}

    def put(self, name: str, data: memoryview) -> common_pb2.BlobRef:
        """A reference without its producer. Raises OSError where the tmpfs has no room."""
        turn = self._turn[name] = 1 - self._turn.get(name, 1)
        blob_id = f"{self._prefix}-{name}-{turn}"
        mapped = self._mapped.get(blob_id)
        if mapped is None or len(mapped) != data.nbytes:
            mapped = self._mapped[blob_id] = self._map(blob_id, data.nbytes)
        mapped[:] = data.cast("B")
        return common_pb2.BlobRef(blob_id=blob_id, size_bytes=data.nbytes, digest=digest_bytes(data))

    def _map(self, blob_id: str, size: int) -> mmap.mmap:
        handle = os.open(self._folder / blob_id, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(handle, size)
            os.posix_fallocate(
                handle, 0, size
            )  # writing to pages that a full tmpfs cannot give would kill the process
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)


class BlobServicer(blobs_pb2_grpc.BlobServiceServicer):
    """headrace.common.v1.BlobService over a store."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    async def FetchBlob(
        self, request: blobs_pb2.FetchBlobRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[blobs_pb2.FetchBlobResponse]:
        """Streams a blob from an offset."""
        size = self._store.size(request.blob)
        with self._store.open(request.blob) as file:
            if request.offset_bytes > size:
                raise invalid("offset_bytes", f"{request.offset_bytes} is beyond the blob's {size} bytes")
            file.seek(request.offset_bytes)
            while data := file.read(CHUNK_BYTES):
                yield blobs_pb2.FetchBlobResponse(offset_bytes=file.tell() - len(data), data=data)


class BlobReader:
    """Takes blobs from files below `root`, the host's SHM_DIR, or from their producers; needs an event loop."""

    def __init__(self, root: Path, token: str | None) -> None:
        self._root = root
        self._token = token
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def read(self, reference: common_pb2.BlobRef) -> bytearray:
        """The verified body, in memory of its own: an array over it needs no copy.

        Raises ServiceError INVALID for a reference that names no file, DIGEST_MISMATCH, and BLOB_GONE when neither
        the file nor the producer has it.
        """
        # An incarnation's id is unique, so a directory of that name is the producer's: this is its host.
        large = reference.size_bytes > LARGE_BYTES
        data = await asyncio.to_thread(self._from_file, reference) if large else self._from_file(reference)
        if data is None:
            data = await self._from_producer(reference)
        digest = await asyncio.to_thread(digest_bytes, data) if large else digest_bytes(data)
        if len(data) != reference.size_bytes or digest != reference.digest:
            raise _mismatch(reference)
        return data

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    def _from_file(self, reference: common_pb2.BlobRef) -> bytearray | None:
        for name in (reference.incarnation, reference.blob_id):
            if not _NAME.fullmatch(name):
                raise ServiceError(
                    grpc.StatusCode.INVALID_ARGUMENT, "INVALID", f"a blob reference names {name!r}"
                )
        path = self._root / reference.incarnation / _FOLDER / reference.blob_id
        try:
            handle = open_below(self._root, path)
        except OSError:
            return None
        try:
            if os.fstat(handle).st_size != reference.size_bytes:
                raise _mismatch(reference)
            found = bytearray(reference.size_bytes)
            with os.fdopen(handle, "rb", closefd=False) as file:
                file.readinto(found)
            return found
        finally:
            os.close(handle)

    async def _from_producer(self, reference: common_pb2.BlobRef) -> bytearray:
        address = reference.producer_address
        if not address:
            raise _gone(reference, "its file is not on this host and it names no address")
        if address not in self._channels:
            self._channels[address] = dial(address, token=self._token)
        stub = blobs_pb2_grpc.BlobServiceStub(self._channels[address])  # type: ignore[no-untyped-call]
        found, limit_s = bytearray(), FETCH_S + reference.size_bytes / SLOW
        try:
            async with asyncio.timeout(limit_s):
                async for piece in stub.FetchBlob(blobs_pb2.FetchBlobRequest(blob=reference)):
                    if len(found) + len(piece.data) > reference.size_bytes:
                        break
                    found += piece.data
        except grpc.aio.AioRpcError as error:
            raise _gone(reference, f"{address}: {message_of(error)}") from error
        except TimeoutError as error:
            raise _gone(reference, f"{address} did not send it within {limit_s:.0f} s") from error
        return found


def _write(path: Path, data: bytes | bytearray | memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


def _mismatch(reference: common_pb2.BlobRef) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DATA_LOSS,
        "DIGEST_MISMATCH",
        f"blob {reference.blob_id} of {reference.incarnation}: its bytes are not those of the reference",
    )


def _gone(reference: common_pb2.BlobRef, why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.NOT_FOUND, "BLOB_GONE", f"blob {reference.blob_id} of {reference.incarnation}: {why}"
    )
