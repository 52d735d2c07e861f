"""A way by which a version comes to a receiver: the interface, and what all of them share.

A way brings a whole, verified version into a store, or leaves nothing there and says why. Two filters go with those
over the network: tensors that the receiver holds are not sent, and of the others only what has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.rpc.digests import tensor_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.metrics import WEIGHT_FALLBACKS
from headrace_servicekit.weights.arrivals import Arrival, Turn
from headrace_servicekit.weights.delta import Changes
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import (
    PendingPart,
    PendingWeights,
    StoredWeights,
    layout_of,
    part_name,
    part_of,
    unavailable,
)

WHOLE_EVERY = 16
"""Versions after which one comes whole where changes are quicker, and after which changes are tried again where not."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A verified version in the receiver's store, the bytes that were moved for it, and whether they were changes."""

    stored: StoredWeights
    moved: int
    changes: bool = False


@dataclass(frozen=True)
class Attempt:
    """One receiver's try at a version: the versions of the run that it holds, and what has failed so far.

    With `into` it is a part of a version, which lands there and is nothing that others of the host could read.
    """

    store: WeightStore
    run: str
    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    token: str | None
    held: tuple[StoredWeights, ...] = ()
    turn: Turn = field(default_factory=Turn)
    failures: list[ServiceError] = field(default_factory=list)
    into: PendingPart | None = None

    @contextmanager
    def noting(self, way: str, source: common_pb2.WeightSource) -> Iterator[None]:
        """Logs, counts and keeps a failure, with its source: the next one may deliver."""
        try:
            yield
        except ServiceError as failure:
            failure.message = f"{way} from {source.incarnation}: {failure.message}"
            log.warning("weights: %s", failure.message)
            WEIGHT_FALLBACKS.labels(way).inc()
            self.failures.append(failure)

    def kept(self) -> dict[int, memoryview]:
        """Tensors that a held version has too, by their place in the manifest; their bytes are checked."""
        found = {}
        for each in self.held:
            for entry in each.manifest.entries:
                stretch = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
                found[entry.name, entry.digest] = each.body[stretch]
        kept = {}
        for place, entry in enumerate(self.manifest.entries):
            own = found.get((entry.name, entry.digest)) if entry.size_bytes else memoryview(b"")
            if own is not None and len(own) == entry.size_bytes and tensor_digest(own) == entry.digest:
                kept[place] = own
        return kept

    def base(self, source: common_pb2.WeightSource) -> StoredWeights | None:
        """The newest version that is held and from which the source tells changes."""
        fit = [
            held
            for held in self.held
            if held.version.digest in source.delta_bases and len(held.body) == self.manifest.size_bytes
        ]
        return max(fit, key=lambda held: held.version.number, default=None)

    async def fill(
        self, pour: Callable[[Arrival], Awaitable[bool]], held: Mapping[int, memoryview]
    ) -> Found | None:
        """The version of what is held and what `pour` adds; None, and nothing is left, where that returns False."""
        pending = self.into or self._begin()
        arrival = Arrival(pending.whole(), self.manifest.entries, held)
        number, whole = self.version.number, self.into is None
        try:
            try:
                with self.store.arrives(self.run, number, arrival) if whole else nullcontext():
                    await arrival.copy_held()
                    poured = await pour(arrival)
            finally:
                arrival.end()
            if not poured:
                pending.discard()
                return None
            if arrival.offset < arrival.size:
                raise unavailable(f"it ended at byte {arrival.offset} of {arrival.size}")
            stored = pending.publish(self.version, self.manifest)
        except BaseException:
            pending.discard()
            raise
        base = arrival.base
        if base is not None and whole and 2 * arrival.moved <= arrival.size:
            changes = Changes(self.manifest, stored.body, None, base.version.digest, made=arrival.changes)
            self.store.keep_changes(self.run, number, changes)
        return Found(stored, arrival.moved, changes=base is not None)

    def _begin(self) -> PendingWeights:
        return self.store.begin(self.run, self.version.number, layout_of(self.manifest))

    def parts(
        self, source: common_pb2.WeightSource
    ) -> tuple[PendingWeights, list[tuple[Attempt, common_pb2.WeightSource]]]:
        """The body that several ranks fill, and a try at each of their parts with its source.

        Raises ServiceError for parts that are not the version's, and NO_SPACE.
        """
        if (told := sum(part.tensors for part in source.parts)) != len(self.manifest.entries):
            raise unavailable(f"its parts have {told} tensors, and the version {len(self.manifest.entries)}")
        body, found, first = self._begin(), [], 0
        for part in source.parts:
            own = common_pb2.WeightSource()
            own.CopyFrom(part.source)
            own.receivers = source.receivers
            found.append((self._part(body, first, first + part.tensors), own))
            first += part.tensors
        return body, found

    def _part(self, body: PendingWeights, first: int, last: int) -> Attempt:
        """A part as a version; with the same part of what is held, where it is laid out alike."""
        version, manifest = part_of(self.version, self.manifest, first, last)
        layout, offset = layout_of(self.manifest), self.manifest.entries[first].offset_bytes
        held = []
        for each in self.held:
            if layout_of(each.manifest) == layout:
                before = part_of(each.version, each.manifest, first, last)
                stretch = each.body[offset : offset + manifest.size_bytes]
                held.append(StoredWeights(*before, stretch, None, each.segment))
        return replace(
            self,
            run=part_name(self.run),
            version=version,
            manifest=manifest,
            held=tuple(held),
            into=PendingPart(body, offset, manifest.size_bytes),
        )


@dataclass
class Links:
    """Chooses between whole bodies and changes by what either took here.

    The first version comes whole, the next one by its changes; then whichever was quicker. The other one is taken
    every `whole_every` versions, which measures it anew; `always`: changes whenever there are any, and whole bodies
    every `whole_every` versions.
    """

    whole_every: int = WHOLE_EVERY
    always: bool = False
    _whole: float = 0.0
    _changes: float = 0.0
    """Seconds a byte of the body; 0: not known."""
    _since_whole: int = 0
    _since_changes: int = 0

    def wants_changes(self) -> bool:
        """Whether the next version should come by its changes."""
        if self._since_whole >= self.whole_every - 1:
            return False
        if self.always or not self._changes:
            return self.always or bool(self._whole)
        return self._changes < self._whole or self._since_changes >= self.whole_every - 1

    def took(self, size: int, seconds: float, *, changes: bool) -> None:
        """A body of `size` bytes came."""
        if changes:
            self._changes, self._since_changes = seconds / size, 0
            self._since_whole += 1
        else:
            self._whole, self._since_whole = seconds / size, 0
            self._since_changes += 1


class Way:
    """One way; `name` is what specs and messages say."""

    name: str
    kind: common_pb2.WeightTransport
    links: Links | None = None
    """What compares ways over the network. None: within a host. Such are tried first, each instance by itself."""

    def offered(self, attempt: Attempt, source: common_pb2.WeightSource) -> bool:
        """Whether both sides can. Raises ServiceError where it should have been possible and is not."""
        for each in source.withheld:
            if each.transport == self.kind:
                raise withheld(each.reason)
        return self.kind in source.transports

    async def take(self, attempt: Attempt, sources: Sequence[common_pb2.WeightSource]) -> Found | None:
        """Takes it from the first of the sources that delivers; None where all failed, as `attempt` then says."""
        for source in sources:
            with attempt.noting(self.name, source):
                return await self.take_from(source, attempt)
        return None

    async def take_from(self, source: common_pb2.WeightSource, attempt: Attempt) -> Found | None:
        """Takes it from one source. Raises ServiceError."""
        raise NotImplementedError


def withheld(reason: str) -> ServiceError:
    """The error for a way that one side knows and cannot offer."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "WITHHELD", reason)
