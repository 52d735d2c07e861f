"""Keeps the messages of runs' calls, so that a step can be repeated from a file.

`Recorder` belongs to a process that calls instances, `RunRecorder` is what it keeps of one run. Call both
from one event loop.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.common.v1 import recording_pb2

from headrace_servicekit.folders import read_below, replace_below
from headrace_servicekit.recording.files import SUFFIX, Part, new_header
from headrace_servicekit.recording.segments import Segments

OPENINGS = frozenset({"OpenRun", "JoinTrainerGroup"})
"""Calls that a recording begins with, however long ago they were made: they are kept while nothing else is."""
UNKEPT = frozenset({"FetchLedger", "FetchTrajectories", "ListCheckpoints", "ListInventory", "SaveCheckpoint"})
"""Calls that change nothing of a step's result, or repeat what other calls have said."""
ENDPOINT_KEY = "endpoint_key"
"""The one secret of a configuration, which is left out: where a spec has one, a reference stands for it."""
WANTED = "wanted.json"
Description = tuple[str, Sequence[recording_pb2.RecordedInstance]]
NO_BASE = "the trainer's calls begin at a version that no checkpoint here has"
LEFT_OUT = "some messages are left out: the disk was too slow, or the step exceeds recording.max_bytes"
BEYOND_BUDGET = (
    "the steps since the trainer's last checkpoint exceed recording.max_bytes: the first ones are dropped"
)


class Recorder:
    """The runs of this process that may be recorded, by name ("runs/{run}")."""

    def __init__(self) -> None:
        self._runs: dict[str, RunRecorder] = {}
        self._ids = itertools.count(1)

    def open(self, recorder: RunRecorder) -> RunRecorder:
        """Hears the calls of a run from now on."""
        self._runs[recorder.run] = recorder
        return recorder

    def close(self, recorder: RunRecorder) -> None:
        """Hears them no more."""
        if self._runs.get(recorder.run) is recorder:
            del self._runs[recorder.run]
        recorder.close()

    def of(self, run: str) -> RunRecorder | None:
        """What is kept of a run, while it works."""
        return self._runs.get(run)

    def call(self, kind: str, incarnation: str, method: str, first: Any) -> CallRecorder | None:
        """A call whose first request is `first`; None where nobody records its run."""
        if not self._runs or method in UNKEPT:
            return None
        header = getattr(_authority(first), "header", None)
        run = self._runs.get(header.run) if header is not None else None
        if run is None:
            return None
        return CallRecorder(run, next(self._ids), kind, incarnation, method, first)


class CallRecorder:
    """One call of a run that may be recorded."""

    def __init__(
        self, run: RunRecorder, number: int, kind: str, incarnation: str, method: str, first: Any
    ) -> None:
        self._run, self._number, self._first = run, number, first
        self._kind, self._incarnation, self._method = kind, incarnation, method
        self._opens = method in OPENINGS
        self._parts: list[recording_pb2.RecordedPart] = []
        self._segment = 0
        self._requests = 0

    def request(self, message: Any) -> None:
        """A message that is sent."""
        if self._heard:
            self._tell(Part(request=_encoded(message)))
        self._requests += 1

    def response(self, message: Any) -> None:
        """A message that came."""
        if self._heard:
            self._tell(Part(response=message.SerializeToString()))

    def ended(self, reason: str = "", detail: str = "") -> None:
        """It is over; `reason` is empty where it succeeded."""
        if not self._heard:
            return
        self._tell(Part(ended=recording_pb2.RecordedEnd(reason=reason, detail=detail[:2000])))
        if self._opens and not reason:
            self._run.opened(self._incarnation, self._method, self._parts)
        if self._method == "Restore" and not reason and not self._first.carried:
            self._run.restored()

    @property
    def _heard(self) -> bool:
        return self._run.active or self._opens

    def _tell(self, part: recording_pb2.RecordedPart) -> None:
        part.call, part.at = self._number, time.time()
        if self._opens:
            if not self._parts:
                self._parts.append(self._begun(part.at))
            self._parts.append(part)
        if self._run.active:
            if self._segment != self._run.segment:
                self._segment = self._run.segment
                self._run.write(self._begun(part.at))
            self._run.write(part)

    def _begun(self, at: float) -> recording_pb2.RecordedPart:
        begun = recording_pb2.RecordedCall(
            kind=self._kind, incarnation=self._incarnation, method=self._method, step=self._run.step
        )
        if self._requests:
            begun.opening = _encoded(_authority(self._first, alone=True))
        return Part(call=self._number, at=at, begun=begun)


@dataclass(frozen=True)
class Kept:
    """A recording that was kept, with its bytes."""

    path: Path
    size: int


class RunRecorder:
    """What is kept of one run, in `directory`, a folder of the run's directory.

    `keep`: recordings of no steps but those asked for ("none"), of those that fail ("failed"), or of "all". At most
    `max_count` recordings of `max_bytes` together stay, and what is kept to make one takes at most `max_bytes` too.
    """

    def __init__(
        self, run: str, directory: Path, keep: str = "none", max_bytes: int = 2 << 30, max_count: int = 8
    ) -> None:
        self.run, self.directory = run, directory
        self.step = 0
        self.base: recording_pb2.RecordedBase | None = None
        """The checkpoint that what is kept goes on from."""
        self._keep, self._max_bytes, self._max_count = keep, max_bytes, max_count
        self._segments = Segments(directory.parents[1], directory / ".segments", max_bytes)
        self._wanted = read_wanted(directory)
        self._restored = False  # What is kept begins with a Restore.
        self._missing = ""
        self._left_out = self._without_base = False
        self._reason = ""
        self._in_step = self._wanted_now = False
        self._openings: dict[tuple[str, str], list[recording_pb2.RecordedPart]] = {}
        self._prologue: list[recording_pb2.RecordedPart] = []

    @property
    def trouble(self) -> str:
        """Why nothing is recorded any more: what the disk said; "" where it works."""
        return self._segments.trouble

    @property
    def segment(self) -> int:
        """Number of the segment that is written."""
        return self._segments.number

    @property
    def active(self) -> bool:
        """Whether calls are recorded now."""
        return not self.trouble and (self._keep != "none" or self._wanted_now)

    def needs_base(self, step: int) -> bool:
        """Whether a checkpoint is to be made before a step, since its recording would have no beginning."""
        if self.trouble or self._without_base or self.base is not None or self._restored:
            return False
        return step in self._wanted or (self._keep != "none" and not self._missing)

    def first_step(self, step: int) -> int:
        """The first step from `step`, the next or open one, on whose recording may be asked for."""
        unheard = self._in_step and self.step == step and not self.active
        return step + 1 if unheard else step

    def ask(self, steps: Iterable[int]) -> None:
        """Wants the recordings of steps; the next process of the run knows it too. Raises OSError."""
        wanted = self._wanted | set(steps)
        write_wanted(self.directory, wanted)
        self._wanted = wanted

    # --- a step

    def begin(self, step: int) -> None:
        """A step begins, from 1: what is said from now on is its. Nothing where it has begun."""
        if self._in_step and self.step == step:
            return
        self.step, self._in_step, self._reason, self._left_out = step, True, "", False
        self._wanted_now = step in self._wanted
        self._segments.next()
        if self._segments.drop_beyond_budget():
            self.base, self._restored, self._missing = None, False, BEYOND_BUDGET

    def fails(self, reason: str) -> None:
        """The step has failed, or a part of it; the first reason counts."""
        self._reason = self._reason or reason

    async def end(self, describe: Callable[[], Description]) -> Kept | None:
        """The step, or this attempt at it, is over: its recording, where it is kept and the disk takes it.

        `describe` is asked for the run's spec, as JSON, and its instances.
        """
        reason, recorded = self._why(), self.active and self._in_step
        self._segments.next()
        self._in_step = self._wanted_now = False
        kept = None
        if reason and recorded:
            kept = await self._put_together(reason, *describe())
        if self._keep == "none" and recorded:
            self._segments.drop_ended()
            self._begins_here()
        return kept

    def _why(self) -> str:
        if self._wanted_now:
            return self._reason or "asked for"
        if self._keep == "all":
            return self._reason or "recording.keep: all"
        return self._reason if self._keep == "failed" else ""

    async def _put_together(
        self, reason: str, spec_json: str, instances: Sequence[recording_pb2.RecordedInstance]
    ) -> Kept | None:
        begins = self._restored or self.base is not None
        header = new_header(
            run=self.run,
            step=self.step,
            reason=reason,
            kept_at=time.time(),
            spec_json=spec_json,
            base=None if self._restored else self.base,
            instances=instances,
            incomplete=LEFT_OUT if self._left_out else "" if begins else self._missing or NO_BASE,
        )
        path = self._free_path()
        opening = list(self._prologue) if begins else self._known_openings()
        size = await self._segments.put_together(path, header, opening, self._drop_oldest)
        if not size:
            return None
        if self.step in self._wanted:
            self._wanted = self._wanted - {self.step}
            with suppress(OSError):  # It would be recorded once more, after a restart.
                write_wanted(self.directory, self._wanted)
        return Kept(path, size)

    def _free_path(self) -> Path:
        names = (f"step-{self.step}{'' if n == 1 else f'-{n}'}{SUFFIX}" for n in itertools.count(1))
        return next(path for name in names if not (path := self.directory / name).exists())

    def _drop_oldest(self) -> None:
        """Drops recordings beyond the budget, the oldest first; the newest stays."""
        found = sorted((path.stat().st_mtime, path) for path in self.directory.glob(f"*{SUFFIX}"))
        sizes = {path: path.stat().st_size for _, path in found}
        for _, path in found[:-1]:
            if len(sizes) <= self._max_count and sum(sizes.values()) <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            del sizes[path]

    # --- where the trainer's calls begin

    def restored(self) -> None:
        """The trainer holds what a Restore has loaded: what was said before this segment is not needed."""
        self._begins_here()
        self._restored = True
        self._segments.drop_ended()

    def based(self, checkpoint: str, number: int, digest: str, step: int) -> None:
        """A checkpoint of what step `step` has made is durable: what was said up to then is not needed.

        Everything since that step must have been heard. An older checkpoint than the one that is known changes nothing.
        """
        if self.base is not None and number < self.base.number:
            return
        self._segments.next()
        self._begins_here()
        self.base = recording_pb2.RecordedBase(checkpoint=checkpoint, number=number, digest=digest)
        self._segments.drop_through(step)

    def not_based(self, reason: str) -> None:
        """The checkpoint that was needed cannot be made: what is recorded has no beginning, and says why."""
        self._missing, self._without_base = reason, True

    def _begins_here(self) -> None:
        self.base, self._restored, self._missing, self._without_base = None, False, "", False
        self._prologue = self._known_openings()

    def _known_openings(self) -> list[recording_pb2.RecordedPart]:
        """In the order of their times: ranks join a trainer group side by side."""
        known = (part for parts in self._openings.values() for part in parts)
        return sorted(known, key=lambda part: part.at)

    def opened(self, incarnation: str, method: str, parts: list[recording_pb2.RecordedPart]) -> None:
        """An instance has opened the run, or joined its trainer group: any recording begins with that."""
        self._openings[incarnation, method] = parts

    def write(self, part: recording_pb2.RecordedPart) -> None:
        """Appends a part."""
        self._left_out |= not self._segments.write(part, self.step)

    def close(self) -> None:
        """Drops what is no recording yet."""
        self._segments.close()


def read_wanted(directory: Path) -> set[int]:
    """Steps whose recordings were asked for and are not made yet."""
    with suppress(OSError, ValueError):
        with read_below(directory.parents[1], directory / WANTED) as file:
            return {int(step) for step in json.load(file)}
    return set()


def write_wanted(directory: Path, steps: Iterable[int]) -> None:
    """Writes the steps whose recordings are asked for, durably. Raises OSError."""
    with replace_below(directory.parents[1], directory / WANTED, synced=True) as file:
        file.write(json.dumps(sorted(steps)).encode())


def _authority(first: Any, *, alone: bool = False) -> Any:
    """What the first request of a stream has of authority: itself, or the message that opens it; `alone`: no more."""
    opens = "open" in type(first).DESCRIPTOR.fields_by_name
    if not alone:
        return first.open if opens else first
    return type(first)(open=first.open) if opens else type(first)(header=first.header)


def _encoded(message: Any) -> bytes:
    """A message on the wire; of a configuration, without the key of the run's endpoint."""
    if "config_json" in type(message).DESCRIPTOR.fields_by_name:
        with suppress(ValueError):
            config = json.loads(message.config_json)
            if ENDPOINT_KEY in config:
                config[ENDPOINT_KEY] = ""
            found = type(message)()
            found.CopyFrom(message)
            found.config_json = json.dumps(config)
            return bytes(found.SerializeToString())
    return bytes(message.SerializeToString())
