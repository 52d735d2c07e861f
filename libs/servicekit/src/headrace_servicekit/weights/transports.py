"""How a version may travel to a receiver: the interface, and which way of two is quicker over the network.

A transport brings a whole, verified version into a store, or leaves nothing there and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.metrics import WEIGHT_FALLBACKS
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.arrivals import Arrival, Turn
from headrace_servicekit.weights.delta import Changes
from headrace_servicekit.weights.pending import PendingPart, PendingWeights, StoredWeights, layout_of
from headrace_servicekit.weights.store import WeightStore

WHOLE_EVERY = 16
"""Versions after which one comes whole where changes are quicker, and after which changes are tried again where not."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A version that a receiver is to hold, and the versions of the run that it holds.

    With `into` it is a part of one, which lands there and is nothing that others of the host could read.
    """

    run: str
    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    held: tuple[StoredWeights, ...] = ()
    into: PendingPart | None = None

    def begin(self, store: WeightStore) -> PendingWeights | PendingPart:
        """Where its bytes are written, as `WeightStore.begin`; again where the way before has failed."""
        if self.into is not None:
            return self.into
        return store.begin(self.run, self.version.number, layout_of(self.manifest))

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
            if own is not None and len(own) == entry.size_bytes and digest_bytes(own) == entry.digest:
                kept[place] = own
        return kept

    @contextmanager
    def arrives(self, store: WeightStore, arrival: Arrival) -> Iterator[None]:
        """Shows what arrives to those who read along."""
        if self.into is None:
            with store.arrives(self.run, self.version.number, arrival):
                yield
            return
        try:
            yield
        finally:
            arrival.end()

    def keep_changes(self, store: WeightStore, changes: Changes) -> None:
        """Serves changes that it was made of."""
        if self.into is None:
            store.keep_changes(self.run, self.version.number, changes)


@dataclass
class Attempt:
    """One receiver's try at a version: its token, its turn to bring one to this host, and what has failed so far."""

    token: str | None
    turn: Turn
    failures: list[ServiceError] = field(default_factory=list)

    @contextmanager
    def noting(self, transport: str, source: common_pb2.WeightSource) -> Iterator[None]:
        """Logs, counts and keeps a failure, with its source: the next one may deliver."""
        try:
            yield
        except ServiceError as failure:
            failure.message = f"{transport} from {source.incarnation}: {failure.message}"
            log.warning("weights: %s", failure.message)
            WEIGHT_FALLBACKS.labels(transport).inc()
            self.failures.append(failure)


@dataclass(frozen=True)
class Found:
    """A verified version in the receiver's store, the bytes that were moved for it, and whether they were changes."""

    stored: StoredWeights
    moved: int
    changes: bool = False


class Transport(Protocol):
    """One way."""

    @property
    def name(self) -> str:
        """The name that specs and messages use."""

    @property
    def kind(self) -> common_pb2.WeightTransport: ...

    @property
    def links(self) -> Links | None:
        """What compares ways over the network. None: within a host. Such are tried first, each instance by itself."""

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Whether both sides can. Raises ServiceError where it should have been possible and is not."""

    async def take(
        self,
        store: WeightStore,
        wanted: Wanted,
        sources: Sequence[common_pb2.WeightSource],
        attempt: Attempt,
    ) -> Found | None:
        """Takes it from the first of the sources that delivers; None where all failed, as `attempt` then says."""


class OneSource:
    """A way by which one source delivers all of a version."""

    name: str
    kind: common_pb2.WeightTransport

    async def take(
        self,
        store: WeightStore,
        wanted: Wanted,
        sources: Sequence[common_pb2.WeightSource],
        attempt: Attempt,
    ) -> Found | None:
        """As `Transport.take`."""
        for source in sources:
            with attempt.noting(self.name, source):
                return await self.take_from(source, store, wanted, attempt)
        return None

    async def take_from(
        self, source: common_pb2.WeightSource, store: WeightStore, wanted: Wanted, attempt: Attempt
    ) -> Found:
        """Takes it from one. Raises ServiceError."""
        raise NotImplementedError


def base_of(wanted: Wanted, source: common_pb2.WeightSource) -> StoredWeights | None:
    """The newest version that is held and from which the source tells changes."""
    fit = [
        held
        for held in wanted.held
        if held.version.digest in source.delta_bases and len(held.body) == wanted.manifest.size_bytes
    ]
    return max(fit, key=lambda held: held.version.number, default=None)


def refuse_withheld(kind: common_pb2.WeightTransport, source: common_pb2.WeightSource) -> None:
    """Raises ServiceError WITHHELD, with the source's reason, for a transport that it knows and cannot offer."""
    for each in source.withheld:
        if each.transport == kind:
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "WITHHELD", each.reason)


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
