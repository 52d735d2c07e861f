"""What the event log needs of a store, and the file that says which store a data directory belongs to.

A store has one conditional append, and snapshots that let the log be trimmed. Knows neither Redis nor events.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Protocol

import msgspec

LEAP = 1 << 20
"""How far counters leap at a start, so that numbers of a lost last second are never issued again."""


class Fenced(Exception):
    """Another coordinator has the store: stop at once, nothing was written."""


class StoreAway(Exception):
    """The store does not answer, or refuses writes now; the same call may be tried again. The text is the store's."""


class ForeignStore(Exception):
    """The store is empty or belongs to another data directory: refuse to start without its events."""


class DamagedStore(Exception):
    """What the store holds cannot be read; the message says where, and what to do.

    `what` is "snapshot" or "event", `number` the event's, or that of the last event that the snapshot covers.
    """

    def __init__(self, what: str, number: int, good: int, reason: str) -> None:
        where = f"event {number} of the log" if what == "event" else f"the snapshot of event {number}"
        super().__init__(
            f"the store is damaged: {where} cannot be read ({reason}). The last good one is event {good}. Give back "
            "a copy of its data from before; of the store of `headrace up`, `headrace repair` keeps what is good"
        )
        self.what, self.number, self.reason = what, number, reason


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
        """Makes the caller the leader; raises `Fenced` with the name of the present one."""

    async def keep_claim(self) -> None:
        """Renews the claim, or takes it again if it ran out and nobody else has it; proves that writes are accepted.

        Raises:
            Fenced: another coordinator has taken the store.
            StoreAway: unreachable, or writes are refused (the claim is renewed where the store allows that).
        """

    async def load(self) -> Stored:
        """The latest snapshot and every event after it."""

    async def begin(self, epoch: int, store_id: str) -> None:
        """Makes `epoch` the only one that may append; raises `Fenced` unless it is the highest."""

    async def raise_epoch(self, present: int, epoch: int, store_id: str) -> None:
        """Does the same, but only while `present` is the active epoch. The same call may be repeated."""

    async def append(self, epoch: int, expected: int, first: int, payloads: list[bytes]) -> None:
        """Appends events as `first`, `first`+1, … if the log ends at `expected`. The same call may be repeated.

        Raises:
            Fenced: another epoch has begun, or the log ends elsewhere.
            StoreAway: no answer; whether it was written is unknown, so repeat it.
        """

    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        """Replaces the snapshot, then trims the log up to `sequence`."""


class Marks(msgspec.Struct, frozen=True):
    """Highest coordinator epoch and event number that a data directory has seen."""

    epoch: int = 0
    sequence: int = 0


class StoreMarker:
    """A file in the data directory with three lines: store id, epoch, sequence.

    Tells an emptied store, a foreign one and an older copy from the right one.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = Marks()

    def identify(self, stored_id: str) -> tuple[str, Marks]:
        """The store's id, made where there is none yet, and how far its log is known to have come.

        Raises:
            ForeignStore: the store is not the one that the file belongs to.
        """
        expected, marks = self.expected()
        if expected and expected != stored_id:
            found = f"holds store {stored_id}" if stored_id else "is empty"
            raise ForeignStore(
                f"this data directory belongs to store {expected}, but Redis {found}. Give back the Redis data of "
                f"{expected}, or remove {self._path} to start anew (its runs can then not be resumed)."
            )
        return stored_id or uuid.uuid4().hex, marks

    def expected(self) -> tuple[str, Marks]:
        """What the file says: the store's id, "" where there is no file, and how far its log is known to have come."""
        lines = self._path.read_text().split() if self._path and self._path.exists() else []
        expected, *numbers = lines or [""]
        return expected, Marks(*map(int, numbers))

    def keep(self, store_id: str, marks: Marks) -> None:
        """Writes the file if the marks have changed; on a full disk the file keeps its older marks."""
        if self._path is None or marks == self._written:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(f"{store_id}\n{marks.epoch}\n{marks.sequence}\n")
            os.replace(temporary, self._path)
            self._written = marks
