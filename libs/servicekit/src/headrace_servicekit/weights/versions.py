"""A version of the weights: its manifest, its body while it is written, and what is held once it is published.

Knows no way in which it travels, and no store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.memory.segments import Segment
from headrace_servicekit.rpc.digests import (
    digest_stretch,
    in_threads,
    joined_digest,
    manifest_digest,
    stretches,
    tensor_digest,
)
from headrace_servicekit.rpc.errors import ServiceError, invalid
from headrace_servicekit.rpc.tensors import MAX_TENSOR_BYTES, tensor_bytes

BASE_NUMBER = 1
"""Version number of every base."""
Layout = Sequence[tuple[str, "common_pb2.DataType", tuple[int, ...]]]


def base_name(run: str) -> str:
    """The name under which weight stores have a run's frozen weights."""
    return f"{run}/base"


def part_name(run: str) -> str:
    """The name under which weight stores of ranks have their parts of a run's versions."""
    return f"{run}/part"


@dataclass(frozen=True)
class StoredWeights:
    """An immutable version: `body` is read-only and stays valid as long as it is referenced."""

    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    body: memoryview
    path: Path | None
    segment: Segment


class LentMemory:
    """A version in the memory of another process's GPU, for as long as the call `holding` is open.

    `memory`: the bytes, where this process maps them; `handle` and `sums` are for an engine's own processes. `held` is
    False, and `memory` None, once it is given back or the source has withdrawn it.
    """

    def __init__(self, holding: asyncio.Task[None]) -> None:
        self.memory: Any = None
        self.held = True
        self.handle: dict[str, Any] = {}
        self.sums: list[int] = []
        self._holding = holding
        holding.add_done_callback(self._ended)

    def end(self) -> None:
        """Gives it back."""
        self.held, self.memory = False, None
        self._holding.cancel()

    def _ended(self, holding: asyncio.Task[None]) -> None:
        self.held, self.memory = False, None
        if not holding.cancelled():
            holding.exception()


class PendingWeights:
    """A body being written. Ends with `seal` or `discard`; a process that dies leaves it to the janitor."""

    def __init__(
        self,
        number: int,
        entries: list[common_pb2.WeightEntry],
        segment: Segment,
        path: Path,
        publish: Callable[[StoredWeights], StoredWeights],
    ) -> None:
        self.entries, self.segment = entries, segment
        self._number, self._path, self._publish = number, path, publish
        self._by_name = {entry.name: entry for entry in entries}
        self._views: list[memoryview] = []
        self._whole = segment.write()

    def buffer(self, name: str) -> memoryview:
        """Writable bytes of one tensor, C-contiguous little-endian. Raises ServiceError NOT_FOUND."""
        entry = self._by_name.get(name)
        if entry is None:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", f"the layout has no tensor {name!r}")
        return self.stretch(entry.offset_bytes, entry.size_bytes)

    def whole(self) -> memoryview:
        """Writable bytes of the whole body."""
        return self.stretch(0, self.segment.size)

    def stretch(self, offset: int, size: int) -> memoryview:
        """Writable bytes of a part of the body."""
        view = self._whole[offset : offset + size]
        self._views.append(view)
        return view

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
            entry.digest = known or tensor_digest(part)
            part.release()
        return _manifest(self.entries, adapter)

    def publish(
        self, version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest
    ) -> StoredWeights:
        """Publishes verified bytes as `version`; see `seal`."""
        self._release()
        os.chmod(self._path, 0o400)
        body = self.segment.lend()
        self.segment.written()
        return self._publish(StoredWeights(version, manifest, body, self._path, self.segment))

    def discard(self) -> None:
        """Throws the bytes away."""
        self._path.unlink(missing_ok=True)

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
        raise invalid("a weight layout names a tensor twice")
    if offset == 0:
        raise invalid("a weight layout without a single byte")
    return entries


def manifest_of(
    layout: Layout, digests: Mapping[str, str], adapter: common_pb2.AdapterBase | None = None
) -> common_pb2.WeightManifest:
    """The manifest that a body of this layout with tensors of these digests has."""
    entries = entries_of(layout)
    for entry in entries:
        entry.digest = digests.get(entry.name) or tensor_digest(memoryview(b""))
    return _manifest(entries, adapter)


def joined(parts: Sequence[common_pb2.WeightManifest]) -> common_pb2.WeightManifest:
    """The manifest of a body of these parts, in order."""
    entries, offset = [], 0
    for part in parts:
        entries += _moved(part.entries, offset)
        offset += part.size_bytes
    return _manifest(entries)


def part_of(
    version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest, first: int, last: int
) -> tuple[common_pb2.PolicyVersion, common_pb2.WeightManifest]:
    """Some tensors of a version, as the version that they are at the rank that has them."""
    offset = manifest.entries[first].offset_bytes
    part = _manifest(_moved(manifest.entries[first:last], -offset))
    own = common_pb2.PolicyVersion()
    own.CopyFrom(version)
    own.digest = part.digest
    return own, part


def _moved(entries: Iterable[common_pb2.WeightEntry], by: int) -> list[common_pb2.WeightEntry]:
    """Copies of entries, at other offsets."""
    found = []
    for entry in entries:
        own = common_pb2.WeightEntry()
        own.CopyFrom(entry)
        own.offset_bytes += by
        found.append(own)
    return found


def _manifest(
    entries: Sequence[common_pb2.WeightEntry], adapter: common_pb2.AdapterBase | None = None
) -> common_pb2.WeightManifest:
    return common_pb2.WeightManifest(
        entries=entries,
        digest=manifest_digest(entries, adapter),
        size_bytes=sum(entry.size_bytes for entry in entries),
        adapter=adapter,
    )


def check_manifest(version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest) -> None:
    """Refuses a manifest whose entries, sizes or digests contradict each other or the version."""
    if not manifest.entries:
        raise invalid("manifest.entries: a version has at least one tensor")
    layout = layout_of(manifest)
    if sum(tensor_bytes(data_type, shape) for _, data_type, shape in layout) > MAX_TENSOR_BYTES:
        raise invalid(f"manifest.entries: more than {MAX_TENSOR_BYTES} bytes together")
    for entry, expected in zip(manifest.entries, entries_of(layout), strict=True):
        if (entry.offset_bytes, entry.size_bytes) != (expected.offset_bytes, expected.size_bytes):
            raise invalid(f"tensor {entry.name}: offset or size does not follow from its type and shape")
    if manifest.size_bytes != sum(entry.size_bytes for entry in manifest.entries):
        raise invalid(f"the manifest says {manifest.size_bytes} bytes, its entries say otherwise")
    own = manifest_digest(manifest.entries, manifest.adapter)
    if manifest.digest != own or version.digest != manifest.digest:
        raise mismatch(f"version {version.number}: its digest is not that of the manifest's entries")


def check_body(body: memoryview, manifest: common_pb2.WeightManifest) -> None:
    """Raises ServiceError DIGEST_MISMATCH, naming the first tensor that is not the manifest's; in several threads."""
    found: list[list[bytes]] = []
    acts: list[Callable[[], None]] = []

    def add(begin: int, end: int, parts: list[bytes], place: int) -> None:
        def act() -> None:
            with body[begin:end] as part:
                parts[place] = digest_stretch(part)

        acts.append(act)

    for entry in manifest.entries:
        own = stretches(entry.size_bytes)
        found.append([b""] * len(own))
        for place, (begin, end) in enumerate(own):
            add(entry.offset_bytes + begin, entry.offset_bytes + end, found[-1], place)
    in_threads(acts)
    for entry, parts in zip(manifest.entries, found, strict=True):
        check_digest(entry, joined_digest(parts))


def check_digest(entry: common_pb2.WeightEntry, digest: str) -> None:
    """Raises ServiceError DIGEST_MISMATCH where a tensor's bytes have another digest."""
    if digest != entry.digest:
        raise mismatch(f"tensor {entry.name}: the bytes are not those of the manifest")


def unavailable(message: str) -> ServiceError:
    """The error for a source that does not deliver."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WEIGHTS_UNAVAILABLE", message)


def mismatch(message: str) -> ServiceError:
    """The error for other bytes than those of the manifest."""
    return ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", message)
