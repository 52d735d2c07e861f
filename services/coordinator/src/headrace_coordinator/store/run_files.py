"""One run's history on disk, an SQLite file: its public events, and what some are looked up by. Synchronous."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from headrace_servicekit.folders import open_below

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.totals import Shape, Tally, step_index

Item = tuple[int, ev.Event]
Line = tuple[int, bytes]
"""Number of an event, and the event as JSON."""
Step = ev.StepCommitted | ev.StepSkipped
NAME = "events.sqlite3"
STEP, RESTORE, EVALUATION, CHECKPOINT, ASIDE = "step", "restore", "evaluation", "checkpoint", "aside"
UPLOAD = "upload"
CHECKPOINTS = 256
"""How many of the newest checkpoints are searched for those of given steps."""
BUSY_S = 60.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, data BLOB NOT NULL,
    kind TEXT, version INTEGER, ordinal INTEGER, step INTEGER, counts TEXT);
CREATE INDEX IF NOT EXISTS looked_up ON events (kind, number, step, ordinal, version) WHERE kind IS NOT NULL;
CREATE TABLE IF NOT EXISTS shape (run INTEGER PRIMARY KEY, first_slot, slots_per_step, group_size);
"""
LIVE = """NOT EXISTS (SELECT 1 FROM events AS later WHERE later.kind = 'restore' AND later.number > events.number
    AND CASE events.kind WHEN 'step' THEN later.step <= events.step ELSE later.ordinal < events.ordinal END)"""
"""That no rewind took a step or an evaluation away."""


class Keys(NamedTuple):
    """What an event is looked up by. `version` of a skipped step is None; `counts`: the tally after the event."""

    kind: str | None = None
    version: int | None = None
    ordinal: int | None = None
    step: int | None = None
    counts: str | None = None


class RunFiles:
    """The history in `directory`, which is RUN/history. Each write is one transaction that survives a loss of power."""

    def __init__(self, directory: Path, database: sqlite3.Connection) -> None:
        self.directory = directory
        self._database = database

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, *, write: bool = False, synced: bool = True) -> Iterator[RunFiles]:
        """The history for one thread: empty where there is none or a link leads to it, or made where it is written.

        Not `synced`: writes survive the end of this process alone. Raises OSError where the disk refuses, or a link is
        in the way of a write, and sqlite3.DatabaseError where the file is damaged: see `salvage`.
        """
        path = directory / NAME
        try:
            os.close(open_below(directory.parents[1], directory, os.O_DIRECTORY, make=write))
            if path.is_symlink():
                raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed here", str(path))
            found = write or path.stat().st_size
        except OSError as error:
            if write or error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            found = False
        try:
            database = sqlite3.connect(path if found else ":memory:", BUSY_S, isolation_level=None)
            with contextlib.closing(database):
                database.execute(f"PRAGMA synchronous = {'FULL' if synced else 'OFF'}")
                if write or not found:
                    database.executescript("PRAGMA journal_mode = TRUNCATE;" + SCHEMA)
                yield cls(directory, database)
        except sqlite3.OperationalError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error

    # --- writing

    def recover(self, synced: int, stored: int, lines: list[Line]) -> None:
        """Replaces the events after `synced` by `lines`, the later events of the store.

        Events with numbers above `stored`, the store's last one, are set aside: the store is an older copy, or has lost
        its end.
        """
        with self._transaction():
            if (found := self._run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            self._run(f"UPDATE events SET kind = '{ASIDE}' WHERE number > ?", stored)  # nosec B608 - constants and ?
            self._run(f"DELETE FROM events WHERE number > ? AND kind IS NOT '{ASIDE}'", synced)  # nosec B608 - constants and ?
            self._insert((number, ev.decode(data), data) for number, data in lines)

    def append(self, items: Iterable[tuple[int, ev.Event, bytes]]) -> None:
        """Adds events: all or none."""
        with self._transaction():
            self._insert(items)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            self._run("COMMIT")
        finally:
            if self._database.in_transaction:
                self._run("ROLLBACK")

    def _insert(self, items: Iterable[tuple[int, ev.Event, bytes]]) -> None:
        for number, event, data in items:
            self._run("REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", number, data, *self._keys(event))

    def _keys(self, event: ev.Event) -> Keys:
        match event:
            case ev.RunSubmitted(spec=spec):
                size = spec["algorithm"]["group_size"]
                self._set_shape(Shape(0, size * spec["algorithm"]["prompts_per_step"], size))
            case ev.StepCommitted() | ev.StepSkipped():
                tally = self._tally()
                tally.add(event, self._shape())
                made = event.certificate if isinstance(event, ev.StepCommitted) else None
                version, ordinal = (made.number, made.ordinal) if made else (None, None)
                return Keys(STEP, version, ordinal, step_index(event), json.dumps(tally.counts))
            case ev.VersionRestored(frontier_step=step, frontier_prompt=prompt):
                if event.source_run:
                    shape = self._shape()
                    first = step * shape.slots_per_step if prompt is None else prompt * shape.group_size
                    self._set_shape(shape._replace(first_slot=first))
                return Keys(RESTORE, event.number, event.ordinal, step, json.dumps(self.kept(step)[0].counts))
            case ev.Evaluated(view=view):
                return Keys(EVALUATION, view["version"], view["step"])
            case ev.CheckpointSaved():
                return Keys(CHECKPOINT, event.number, step=event.step)
            case ev.CheckpointUploaded():
                return Keys(UPLOAD, event.number, step=event.step)
        return Keys()

    def _set_shape(self, shape: Shape) -> None:
        self._run("REPLACE INTO shape VALUES (0, ?, ?, ?)", *shape)

    def _shape(self) -> Shape:
        found = self._run("SELECT first_slot, slots_per_step, group_size FROM shape").fetchone()
        return Shape(*found) if found else Shape(0, 0, 1)

    def _tally(self) -> Tally:
        """The tally after the last step or restore."""
        query = "SELECT number, step, counts, kind FROM events WHERE kind = ? ORDER BY number DESC LIMIT 1"
        found = [row for kind in (STEP, RESTORE) if (row := self._run(query, kind).fetchone())]
        if not found:
            return Tally()
        _, step, counts, kind = max(found)
        return Tally(step + (kind == STEP), *json.loads(counts))

    # --- reading

    def _run(self, query: str, *values: Any) -> sqlite3.Cursor:
        return self._database.execute(query, values)

    def _rows(self, columns: str, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """(event, *columns) of the rows of events that `query` chooses, without those that are damaged."""
        for data, *found in self._run(f"SELECT data, {columns} FROM events WHERE {query}", *values):  # nosec B608 - constants and ?
            with contextlib.suppress(msgspec.DecodeError, TypeError):
                yield ev.decode(data), *found

    def _events(self, query: str, *values: Any) -> Iterator[Item]:
        return ((number, event) for event, number in self._rows("number", query, *values))

    def after(self, number: int, most: int, most_bytes: int) -> list[Item]:
        """Events with higher numbers, in order, up to what fits."""
        found: list[Item] = []
        query = f"number > ? AND kind IS NOT '{ASIDE}' ORDER BY number LIMIT {most}"
        for event, sequence, size in self._rows("number, length(data)", query, number):
            found.append((sequence, event))
            most_bytes -= size
            if most_bytes <= 0:
                break
        return found

    def before(self, number: int, most: int) -> list[Item]:
        """At most `most` events with lower numbers, the highest one first."""
        query = f"number < ? AND kind IS NOT '{ASIDE}' ORDER BY number DESC LIMIT {most}"
        return list(self._events(query, number))

    def set_aside(self) -> Iterator[ev.Event]:
        """Events that a store which had lost its end knew no more, in order; see `recover`."""
        return (event for _, event in self._events(f"kind = '{ASIDE}' ORDER BY number"))

    def live(self, kind: str, after: int = -1) -> Iterator[Item]:
        """Committed steps, or evaluations, of the live lineage behind event `after`, oldest first."""
        return self._events(
            f"kind = ? AND version IS NOT NULL AND number > ? AND {LIVE} ORDER BY number", kind, after
        )

    def thinned(self, kind: str, points: int) -> tuple[list[ev.Event], int]:
        """(as `live`, at most `points` at even distances with the last one among them; how many there are)."""
        # In one pass, the newest first: to ask LIVE of each takes ten times as long.
        end = "step" if kind == STEP else f"ordinal + (kind = '{RESTORE}')"
        query = f"SELECT number, kind, {end} FROM events WHERE kind IN (?, ?) AND version IS NOT NULL"  # nosec B608 - constants and ?
        numbers, limit = list[int](), sys.maxsize
        for number, found, place in self._run(f"{query} ORDER BY number DESC", kind, RESTORE):
            if found == RESTORE:
                limit = min(limit, place)
            elif place < limit:
                numbers.append(number)
        numbers.reverse()
        count = len(numbers)
        if count > points:
            numbers = [numbers[count - 1 - each * count // points] for each in reversed(range(points))]
        return [event for number in numbers for _, event in self._events("number = ?", number)], count

    def certificates(self, after: int, *, newest: bool = False) -> Iterator[tuple[int, ev.Event, bool]]:
        """(number, event, live) of the committed steps behind event `after`, abandoned ones included.

        With `newest` of those before it, the newest one first.
        """
        behind = "number < ? ORDER BY number DESC" if newest else "number > ? ORDER BY number"
        query = f"kind = ? AND version IS NOT NULL AND {behind}"
        for event, number, live in self._rows(f"number, {LIVE}", query, STEP, after):
            yield number, event, bool(live)

    def newest(self, kind: str, most: int) -> list[ev.Event]:
        """The newest restores or checkpoints, the newest one first."""
        return [event for _, event in self._events(f"kind = ? ORDER BY number DESC LIMIT {most}", kind)]

    def last_figure(self) -> int:
        """The number of the last step or evaluation; 0 when there is none."""
        query = "SELECT max(number) FROM events WHERE kind = ?"
        return max(self._run(query, kind).fetchone()[0] or 0 for kind in (STEP, EVALUATION))

    def checkpoints_of(self, steps: Container[int]) -> set[str]:
        """Names of the newest checkpoints of these steps; some may be deleted."""
        found = self.newest(CHECKPOINT, CHECKPOINTS)
        return {each.name for each in found if isinstance(each, ev.CheckpointSaved) and each.step in steps}

    def kept(self, frontier_step: int) -> tuple[Tally, ev.Event | None]:
        """The tally over live steps below `frontier_step`, and the last one of them that made a version."""
        below = f"kind = '{STEP}' AND step < ? AND {LIVE}"
        query = f"SELECT counts FROM events WHERE {below} ORDER BY number DESC LIMIT 1"  # nosec B608 - constants and ?
        counts = self._run(query, frontier_step).fetchone()
        made = self._events(f"{below} AND version IS NOT NULL ORDER BY number DESC LIMIT 1", frontier_step)
        _, last = next(made, (0, None))
        return Tally(frontier_step, *(json.loads(counts[0]) if counts else ())), last

    def version(self, number: int) -> ev.Certificate | ev.VersionRestored | None:
        """The certificate or the restore that made a version."""
        for kind in (STEP, RESTORE):
            for _, event in self._events("kind = ? AND version = ? ORDER BY number LIMIT 1", kind, number):
                if isinstance(event, ev.StepCommitted):
                    return event.certificate
                if isinstance(event, ev.VersionRestored):
                    return event
        return None

    def steps_from(self, version: int) -> Iterator[Step]:
        """Live committed and skipped steps, newest first, back to that which made `version`."""
        query = f"SELECT min(number) FROM events WHERE kind IN ('{STEP}', '{RESTORE}') AND version >= ?"  # nosec B608 - constants and ?
        since = self._run(query, version).fetchone()[0]
        for _, event in self._events(
            f"kind = ? AND number >= ? AND {LIVE} ORDER BY number DESC", STEP, since
        ):
            if isinstance(event, Step):
                yield event


def salvage(directory: Path) -> None:
    """Replaces a damaged history by its events up to the damage; the damaged file is kept beside it."""
    path = directory / NAME
    damaged = path.with_name(f"{NAME}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    path.replace(damaged)
    path.with_name(f"{NAME}-journal").unlink(missing_ok=True)
    try:
        with RunFiles.opened(directory, write=True) as files, files._transaction():
            for number, event, data, kind in _readable(damaged):
                files._insert([(number, event, data)])
                if kind == ASIDE:
                    files._run("UPDATE events SET kind = ? WHERE number = ?", ASIDE, number)
    except OSError:
        damaged.replace(path)
        raise


def _readable(damaged: Path) -> Iterator[tuple[int, ev.Event, bytes, str]]:
    old = sqlite3.connect(damaged, isolation_level=None)
    sound = contextlib.suppress(sqlite3.DatabaseError, msgspec.DecodeError, TypeError)
    with contextlib.closing(old), sound:
        old.execute("PRAGMA writable_schema = ON")  # Else a file that was cut short is not read at all.
        for number, data, kind in old.execute("SELECT number, data, kind FROM events ORDER BY number"):
            yield number, ev.decode(data), data, kind
