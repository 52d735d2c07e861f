"""A version that lies in parts at the trainer's ranks: each is a version by itself there, and they land in one body.

No rank has the whole, and each sends what it has; the receiver chooses the ways that a part takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.common.v1 import common_pb2

from headrace_servicekit.rpc.digests import manifest_digest
from headrace_servicekit.weights.pending import PendingPart, StoredWeights, layout_of
from headrace_servicekit.weights.pulling import unavailable
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transports import Wanted


def part_name(run: str) -> str:
    """Under which weight stores of ranks have their parts of a run's versions."""
    return f"{run}/part"


class PartedBody:
    """A body that several sources fill, and what is wanted of each of them.

    Raises ServiceError for parts that are not the version's, and NO_SPACE.
    """

    def __init__(self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource) -> None:
        self._wanted = wanted
        if (told := sum(part.tensors for part in source.parts)) != len(wanted.manifest.entries):
            raise unavailable(
                f"its parts have {told} tensors, and the version {len(wanted.manifest.entries)}"
            )
        self._pending = store.begin(wanted.run, wanted.version.number, layout_of(wanted.manifest))
        self.parts: list[tuple[Wanted, common_pb2.WeightSource]] = []
        first = 0
        for part in source.parts:
            own = common_pb2.WeightSource()
            own.CopyFrom(part.source)
            own.receivers = source.receivers
            own_wanted, offset = _part_of(wanted, first, first + part.tensors)
            into = PendingPart(self._pending, offset, own_wanted.manifest.size_bytes)
            self.parts.append((replace(own_wanted, into=into), own))
            first += part.tensors

    def publish(self) -> StoredWeights:
        """The version, once all parts are there and verified."""
        return self._pending.publish(self._wanted.version, self._wanted.manifest)

    def discard(self) -> None:
        """Throws away what has come."""
        self._pending.discard()


def _part_of(wanted: Wanted, first: int, last: int) -> tuple[Wanted, int]:
    """A part as a version, and its place in the body; with the same part of what is held, were it laid out alike."""
    version, offset = _part_version(wanted.version, wanted.manifest, first, last)
    layout = layout_of(wanted.manifest)
    held = []
    for each in wanted.held:
        if layout_of(each.manifest) == layout:
            part, _ = _part_version(each.version, each.manifest, first, last)
            body = each.body[offset : offset + part.manifest.size_bytes]
            held.append(StoredWeights(part.version, part.manifest, body, None, each.segment))
    return Wanted(part_name(wanted.run), version.version, version.manifest, tuple(held)), offset


def _part_version(
    version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest, first: int, last: int
) -> tuple[Wanted, int]:
    entries = []
    offset = manifest.entries[first].offset_bytes
    for entry in manifest.entries[first:last]:
        own = common_pb2.WeightEntry()
        own.CopyFrom(entry)
        own.offset_bytes -= offset
        entries.append(own)
    size = sum(entry.size_bytes for entry in entries)
    part = common_pb2.WeightManifest(entries=entries, digest=manifest_digest(entries, None), size_bytes=size)
    found = common_pb2.PolicyVersion()
    found.CopyFrom(version)
    found.digest = part.digest
    return Wanted("", found, part), offset


def joined(
    parts: Sequence[common_pb2.WeightManifest],
) -> common_pb2.WeightManifest:
    """The manifest of a body of these parts, in order."""
    entries, offset = [], 0
    for part in parts:
        for entry in part.entries:
            own = common_pb2.WeightEntry()
            own.CopyFrom(entry)
            own.offset_bytes += offset
            entries.append(own)
        offset += part.size_bytes
    return common_pb2.WeightManifest(
        entries=entries, digest=manifest_digest(entries, None), size_bytes=offset
    )
