"""How a version may travel to a receiver: the interface, and which way of two is quicker over a link.

A transport brings a whole, verified version into a store, or raises and leaves nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.common.v1 import common_pb2

from headrace_servicekit.weights.store import StoredWeights, WeightStore

WHOLE_EVERY = 16
"""Versions after which one comes whole, where changes are quicker; and as many after which they are tried again."""


@dataclass(frozen=True)
class Wanted:
    """A version that a receiver is to hold, and the versions of the run that it holds."""

    run: str
    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    held: tuple[StoredWeights, ...] = ()


class Transport(Protocol):
    """One way."""

    @property
    def name(self) -> str:
        """As specs and messages name it."""

    @property
    def kind(self) -> common_pb2.WeightTransport: ...

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Whether both sides can. Raises ServiceError where it should have been possible and is not."""

    async def take(
        self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource, token: str | None
    ) -> tuple[StoredWeights, int]:
        """The version in `store`, verified, and the bytes that were moved. Raises ServiceError, with nothing left."""

    def took(self, wanted: Wanted, source: common_pb2.WeightSource, seconds: float) -> None:
        """A version came this way in so many seconds, from the request to the verified body."""


@dataclass
class _Link:
    """What is known of the way to a source: seconds a byte of the body, and what was done since."""

    whole: float = 0.0
    changes: float = 0.0
    since_whole: int = 0
    since_changes: int = 0


@dataclass
class Links:
    """Chooses between whole bodies and changes by what either took over the same link.

    The first version comes whole, the next one by its changes; then whichever was quicker. The other one is taken
    every `whole_every` versions, which measures it anew; `always`: changes whenever there are any, and whole bodies
    every `whole_every` versions.
    """

    whole_every: int = WHOLE_EVERY
    always: bool = False
    _links: dict[str, _Link] = field(default_factory=dict)

    def wants_changes(self, address: str) -> bool:
        """Whether the next version from there should come by its changes."""
        link = self._links.get(address, _Link())
        if link.since_whole >= self.whole_every - 1:
            return False
        if self.always or not link.changes:
            return self.always or bool(link.whole)
        return link.changes < link.whole or link.since_changes >= self.whole_every - 1

    def took(self, address: str, size: int, seconds: float, *, changes: bool) -> None:
        """A body of `size` bytes came from there."""
        link = self._links.setdefault(address, _Link())
        if changes:
            link.changes, link.since_changes = seconds / size, 0
            link.since_whole += 1
        else:
            link.whole, link.since_whole = seconds / size, 0
            link.since_changes += 1
