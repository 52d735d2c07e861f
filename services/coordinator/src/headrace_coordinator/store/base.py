"""What the event log needs of a store: one conditional append, and snapshots that let the log be trimmed."""

from __future__ import annotations

from typing import Protocol

import msgspec

LEAP = 1 << 20
"""How far counters leap at a start, so that a lost last second can never be issued twice."""


class Fenced(Exception):
    """Another coordinator has the store: stop at once, nothing was written."""


class StoreAway(Exception):
    """The store does not answer, or refuses writes now; the same call may be tried again. Says it in its words."""


class ForeignStore(Exception):
    """The store is empty or belongs to another data directory: refuse to start blank."""


class Entry(msgspec.Struct, frozen=True):
    """One event to append."""

    payload: bytes


class Stored(msgspec.Struct):
    """What a start finds: a snapshot that covers events up to a number, and the events after it."""

    store_id: str
    epoch: int
    sequence: int
    snapshot: bytes
    snapshot_sequence: int
    events: list[tuple[int, bytes]]


class Store(Protocol):
    """A durable event log with one writer."""

    async def claim(self, identity: str) -> None:
        """Becomes the leader; raises `Fenced` naming the present one."""

    async def keep_claim(self) -> None:
        """Renews the claim, or takes one that ran out again if nobody else has; proves that writes are accepted.

        Raises:
            Fenced: another coordinator has taken the store.
            StoreAway: unreachable, or writes are refused (the claim is renewed where the store allows that).
        """

    async def load(self) -> Stored:
        """The latest snapshot and every event after it."""

    async def begin(self, epoch: int, store_id: str) -> None:
        """Makes `epoch` the only one that may append; raises `Fenced` unless it is the highest."""

    async def raise_epoch(self, present: int, epoch: int, store_id: str) -> None:
        """As `begin`, but only while `present` is the active epoch. A repeat of the same call is fine."""

    async def append(self, epoch: int, expected: int, first: int, entries: list[Entry]) -> None:
        """Appends entries as `first`, `first`+1, … if the log ends at `expected`. A repeat of the same call is fine.

        Raises:
            Fenced: another epoch has begun, or the log ends elsewhere.
            StoreAway: no answer; whether it was written is unknown, so repeat it.
        """

    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        """Replaces the snapshot, then trims the log up to `sequence`."""

    async def old_runs(self) -> list[str]:
        """Runs of an older release that kept their public events in the store, in streams of their own."""

    async def old_history(self, run: str) -> list[tuple[int, bytes]]:
        """Such a run's public events from its beginning."""

    async def drop_history(self, run: str) -> None:
        """Removes them: they are in files."""
