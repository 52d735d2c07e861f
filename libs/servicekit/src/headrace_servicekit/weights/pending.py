"""A version's body while it is written, and what is held once it is published. Knows no transport."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.rpc.digests import digest_bytes, manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import tensor_bytes
from headrace_servicekit.weights.segments import Segment

if TYPE_CHECKING:
    from headrace_servicekit.weights.store import WeightStore

Layout = Sequence[tuple[str, "common_pb2.DataType", tuple[int, ...]]]


@dataclass(frozen=True)
class StoredWeights:
    """An immutable version: `body` is read-only and stays valid as long as it is referenced."""

    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    body: memoryview
    path: Path | None
    segment: Segment


class PendingWeights:
    """A body being written. Ends with `seal` or `discard`; a process that dies leaves it to the janitor."""

    def __init__(self, store: WeightStore, run: str, number: int, layout: Layout) -> None:
        self._store = store
        self._run = run
        self._number = number
        self.entries = entries_of(layout)
        self._by_name = {entry.name: entry for entry in self.entries}
        self._size = sum(entry.size_bytes for entry in self.entries)
        self._path = store._new_path(run, number)
        self._views: list[memoryview] = []
        self.segment = store._reserve(self._path, self._size)
        self._whole = self.segment.write()

    def buffer(self, name: str) -> memoryview:
        """Writable bytes of one tensor, C-contiguous little-endian. Raises ServiceError NOT_FOUND."""
        entry = self._by_name.get(name)
        if entry is None:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", f"the layout has no tensor {name!r}")
        return self.stretch(entry.offset_bytes, entry.size_bytes)

    def whole(self) -> memoryview:
        """Writable bytes of the whole body."""
        return self.stretch(0, self._size)

    def seal(self, parent: int, ordinal: int) -> tuple[common_pb2.PolicyVersion, common_pb2.WeightManifest]:
        """Computes the digests and publishes the version; from now on it is immutable.

        Raises ServiceError BUFFER_IN_USE while an array or tensor over a `buffer` is still alive.
        """
        manifest = self.manifest()
        version = common_pb2.PolicyVersion(
            number=self._number, parent=parent, ordinal=ordinal, digest=manifest.digest
        )
        self.publish(version, manifest)
        return version, manifest

    def manifest(
        self, digests: Mapping[str, str] | None = None, adapter: common_pb2.AdapterBase | None = None
    ) -> common_pb2.WeightManifest:
        """The manifest of the bytes as they are now; `digests`, by tensor, are those taken while writing them.

        `adapter`: they are adapters of this base.
        """
        for entry in self.entries:
            known = digests.get(entry.name) if digests is not None else None
            part = self._whole[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
            entry.digest = known or digest_bytes(part)
            part.release()
        return common_pb2.WeightManifest(
            entries=self.entries,
            digest=manifest_digest(self.entries, adapter),
            size_bytes=self._size,
            adapter=adapter,
        )

    def publish(
        self, version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest
    ) -> StoredWeights:
        """Publishes verified bytes as `version`; see `seal`."""
        self._release()
        os.chmod(self._path, 0o400)
        body = self.segment.lend()
        self.segment.written()
        stored = StoredWeights(version, manifest, body, self._path, self.segment)
        return self._store._publish(self._run, stored)

    def discard(self) -> None:
        """Throws the bytes away."""
        self._path.unlink(missing_ok=True)

    def stretch(self, offset: int, size: int) -> memoryview:
        """Writable bytes of a part of the body."""
        view = self._whole[offset : offset + size]
        self._views.append(view)
        return view

    def _release(self) -> None:
        """Releases every writable view, so that the bytes stay those of the digests."""
        try:
            for view in self._views:
                view.release()
        except BufferError as error:
            raise self._in_use() from error
        self._views.clear()
        self._whole.release()
        if self.segment.in_use:
            self._whole = self.segment.write()
            raise self._in_use()

    def _in_use(self) -> ServiceError:
        return ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "BUFFER_IN_USE",
            f"version {self._number}: an array over its buffers is still alive; drop it before sealing",
        )


@dataclass(frozen=True)
class PendingPart:
    """A stretch of a body that several sources fill; the body is published or discarded by who made it."""

    whole_body: PendingWeights
    offset: int
    size: int

    def whole(self) -> memoryview:
        """Writable bytes of the part."""
        return self.whole_body.stretch(self.offset, self.size)

    def publish(
        self, version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest
    ) -> StoredWeights:
        """The part is verified; its bytes are seen when the whole is published."""
        return StoredWeights(version, manifest, memoryview(b""), None, self.whole_body.segment)

    def discard(self) -> None:
        """What has come of it is written over, or goes with the whole."""


def layout_of(manifest: common_pb2.WeightManifest) -> Layout:
    """Name, type and shape of each tensor."""
    return [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]


def entries_of(layout: Layout) -> list[common_pb2.WeightEntry]:
    """Contiguous entries of a layout, without digests. Raises ServiceError INVALID for a bad layout."""
    entries: list[common_pb2.WeightEntry] = []
    offset = 0
    for name, data_type, shape in layout:
        size = tensor_bytes(data_type, shape)
        entries.append(
            common_pb2.WeightEntry(
                name=name, data_type=data_type, shape=shape, offset_bytes=offset, size_bytes=size
            )
        )
        offset += size
    if len({entry.name for entry in entries}) != len(entries):
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "a weight layout names a tensor twice"
        )
    if offset == 0:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "a weight layout without a single byte"
        )
    return entries
