"""A file in the data directory: which store its runs belong to, and how far that store's log had come.

Shows an emptied store, a foreign one, and an older copy. Knows neither Redis nor events.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import msgspec

from headrace_coordinator.store.base import ForeignStore


class Marks(msgspec.Struct, frozen=True):
    """Highest coordinator epoch and event number that this data directory has seen."""

    epoch: int = 0
    sequence: int = 0


class Marker:
    """`path` holds three lines: store id, epoch, sequence; older releases wrote only the first."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = Marks()

    def identify(self, stored_id: str) -> tuple[str, Marks]:
        """The store's id, made where there is none yet, and what was seen of it.

        Raises:
            ForeignStore: the store is not the one that the file belongs to.
        """
        lines = self._path.read_text().split() if self._path and self._path.exists() else []
        expected = lines[0] if lines else ""
        if expected and expected != stored_id:
            found = f"holds store {stored_id}" if stored_id else "is empty"
            raise ForeignStore(
                f"this data directory belongs to store {expected}, but Redis {found}. Give back the Redis data of "
                f"{expected}, or remove {self._path} to start anew (its runs can then not be resumed)."
            )
        numbers = [int(line) for line in lines[1:3] if line.isdecimal()]
        return stored_id or uuid.uuid4().hex, Marks(*numbers)

    def keep(self, store_id: str, marks: Marks) -> None:
        """Writes what has been seen; a full disk loses only the newer marks, the file stays whole."""
        if self._path is None or marks == self._written:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(f"{store_id}\n{marks.epoch}\n{marks.sequence}\n")
            os.replace(temporary, self._path)
            self._written = marks
