"""One run's history on disk: segments with its public events, and indexes over what is read by page. Synchronous."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.totals import Shape, Tally, step_index
from headrace_coordinator.store.run_index import COMMITTED, SKIPPED, Index, Range, Record
from headrace_coordinator.store.segments import Line, LinePlace, Segments, sync

Item = tuple[int, ev.Event]
KINDS = ("steps", "restores", "evaluations", "checkpoints")
PAGE = 64
CHECKPOINTS = 256
"""How many of the newest records are searched for the checkpoints of given steps."""
Step = ev.StepCommitted | ev.StepSkipped


class RunFiles:
    """The files below `directory`. One writer; readers may look at any time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments = Segments(directory)
        self.steps, self.restores, self.evaluations, self.checkpoints = (
            Index(directory / f"{kind}.index") for kind in KINDS
        )
        self._end: LinePlace | None = None
        self._tally = Tally()
        self._shape = Shape(0, 0, 1)
        self._number = 0

    # --- writing

    def recover(self, synced: int, stored: int, lines: list[Line]) -> None:
        """Cuts the files back to event `synced`, then appends `lines`, the later events of the store.

        Events of the files with numbers above `stored`, the store's last one, are kept in a file `aside-*.txt`: the
        store is an older copy, or has lost its end.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._end, removed = self.segments.cut(synced)
        beyond = [line for line in removed.splitlines(keepends=True) if _number(line) > stored]
        if beyond:
            (self.directory / f"aside-{_number(beyond[0])}.txt").write_bytes(b"".join(beyond))
        if not self._indexed(synced):
            self._index_again()
        self._restore_totals()
        self.append([(number, ev.decode(data), data) for number, data in lines])

    def append(self, items: list[tuple[int, ev.Event, bytes]]) -> None:
        """Adds events. OSError when the disk refuses: the same call may be repeated."""
        if not items:
            return
        if self._end is None:
            self.directory.mkdir(parents=True, exist_ok=True)
        places = self.segments.append(self._end, [(number, data) for number, _, data in items])
        self._index((number, event, place) for (number, event, _), place in zip(items, places, strict=True))
        self._end = places[-1]

    def set_aside(self) -> Iterator[ev.Event]:
        """Events that a store which had lost its end knew no more, in order; see `recover`."""
        paths = self.directory.glob("aside-*.txt")
        for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("aside-"))):
            for line in path.read_bytes().splitlines():
                if (event := _event(line.partition(b" ")[2])) is not None:
                    yield event

    def sync(self) -> None:
        """Returns when all that was written survives a loss of power."""
        for path in (*self.directory.glob("*.jsonl"), *self.directory.glob("*.index"), self.directory):
            sync(path)

    def _indexed(self, synced: int) -> bool:
        """Whether the indexes are complete and match the segments; records of later lines are cut off."""
        indexes = (self.steps, self.restores, self.evaluations, self.checkpoints)
        if not all(index.path.exists() for index in indexes):
            return False
        for index in indexes:
            index.cut(index.first(lambda record: record.sequence > synced))
            last = index.last()
            if last and self.event(last) is None:
                return False
        return True

    def _index_again(self) -> None:
        for index in (self.steps, self.restores, self.evaluations, self.checkpoints):
            index.cut(0)
        self._tally, self._number = Tally(), 0
        self._index((number, ev.decode(data), place) for (number, data), place in self.segments.after(-1))

    def _restore_totals(self) -> None:
        """Sets the tally and the shape of a step to what they were when the last line was written."""
        first = next(self.segments.after(-1), None)
        if first:
            self._see_shape(ev.decode(first[0][1]))
        first_slot = max((restore.counts[0] for restore in self._restores()), default=0)
        self._shape = self._shape._replace(first_slot=first_slot)
        step, restore = self.steps.last(), self.restores.last()
        self._number = step.number if step else 0
        if restore and (not step or restore.sequence > step.sequence):
            self._tally = self.kept(restore.step)[0]
        elif step:
            self._tally = Tally(step.step + 1, *step.counts)

    def _see_shape(self, event: ev.Event) -> None:
        if isinstance(event, ev.RunSubmitted):
            algorithm = event.spec["algorithm"]
            size = algorithm["group_size"]
            self._shape = Shape(0, size * algorithm["prompts_per_step"], size)

    def _index(self, entries: Iterable[tuple[int, ev.Event, LinePlace]]) -> None:
        found: dict[Index, list[Record]] = {}
        for number, event, place in entries:
            match event:
                case ev.RunSubmitted():
                    self._see_shape(event)
                case ev.StepCommitted() | ev.StepSkipped():
                    found.setdefault(self.steps, []).append(self._step_record(number, event, place))
                case ev.VersionRestored():
                    self._flush(found)
                    self.restores.append([self._restore_record(number, event, place)])
                    self._tally = self.kept(event.frontier_step)[0]
                case ev.Evaluated(view=view):
                    record = Record(number, *place, 0, view["version"], view["step"], view["step"])
                    found.setdefault(self.evaluations, []).append(record)
                case ev.CheckpointSaved():
                    found.setdefault(self.checkpoints, []).append(Record(number, *place, 0, event.number))
        self._flush(found)

    @staticmethod
    def _flush(found: dict[Index, list[Record]]) -> None:
        for index, records in found.items():
            index.append(records)
        found.clear()

    def _step_record(self, sequence: int, event: Step, place: LinePlace) -> Record:
        self._tally.add(event, self._shape)
        kind, ordinal = SKIPPED, 0
        if isinstance(event, ev.StepCommitted):
            kind, self._number, ordinal = COMMITTED, event.certificate.number, event.certificate.ordinal
        counts = self._tally.counts
        return Record(sequence, *place, kind, self._number, ordinal, step_index(event), counts)

    def _restore_record(self, sequence: int, event: ev.VersionRestored, place: LinePlace) -> Record:
        step, first_slot = event.frontier_step, 0
        if event.source_run:
            prompt, size = event.frontier_prompt, self._shape.group_size
            first_slot = step * self._shape.slots_per_step if prompt is None else prompt * size
            self._shape = self._shape._replace(first_slot=first_slot)
        return Record(sequence, *place, 0, event.number, event.ordinal, step, (first_slot, 0, 0, 0, 0, 0))

    # --- reading

    def after(self, number: int, most: int, most_bytes: int) -> list[Item]:
        """Events with higher numbers, in order, up to what fits."""
        found: list[Item] = []
        for (sequence, data), _ in self.segments.after(number):
            found.append((sequence, ev.decode(data)))
            most_bytes -= len(data)
            if len(found) >= most or most_bytes <= 0:
                break
        return found

    def live_steps(self) -> list[Range]:
        """Ranges of positions of the live lineage's steps."""
        return self.steps.live([(each.sequence, each.step) for each in self._restores()])

    def live_evaluations(self) -> list[Range]:
        """Ranges of positions of the live lineage's evaluations."""
        return self.evaluations.live([(each.sequence, each.ordinal + 1) for each in self._restores()])

    def _restores(self) -> list[Record]:
        return self.restores.read(0, len(self.restores))

    def pages(self, index: Index, ranges: list[Range], after: int) -> Iterator[tuple[int, ev.Event]]:
        """(position, event) of the records in `ranges` behind position `after`."""
        for low, high in ranges:
            position = max(low, after + 1)
            while position < high:
                records = index.read(position, min(position + PAGE, high))
                if not records:
                    return
                for line in self.segments.read_all(_place(record) for record in records):
                    if (event := _event(line)) is not None:
                        yield position, event
                    position += 1

    def checkpoints_of(self, steps: Container[int]) -> set[str]:
        """Names of the newest checkpoints of these steps; some may be deleted."""
        end = len(self.checkpoints)
        found = (self.event(record) for record in self.checkpoints.read(max(0, end - CHECKPOINTS), end))
        return {each.name for each in found if isinstance(each, ev.CheckpointSaved) and each.step in steps}

    def kept(self, frontier_step: int) -> tuple[Tally, Record | None]:
        """The tally over live steps below `frontier_step`, and the last one of them that made a version."""
        below: list[Range] = []
        for low, high in self.live_steps():
            below.append((low, self.steps.first(lambda record: record.step >= frontier_step, low, high)))
        for low, high in reversed(below):
            if high > low:
                last = self.steps.read(high - 1, high)[0]
                return Tally(frontier_step, *last.counts), self._last_committed(below)
        return Tally(frontier_step), None

    def _last_committed(self, ranges: list[Range]) -> Record | None:
        for low, high in reversed(ranges):
            for position in range(high - 1, low - 1, -1):
                record = self.steps.read(position, position + 1)[0]
                if record.kind == COMMITTED:
                    return record
        return None

    def version(self, number: int) -> ev.Certificate | ev.VersionRestored | None:
        """The certificate or the restore that made a version."""
        for index in (self.steps, self.restores):
            position = index.first(lambda record: record.number >= number)
            found = index.read(position, position + 1)
            event = self.event(found[0]) if found and found[0].number == number else None
            if isinstance(event, ev.StepCommitted):
                return event.certificate
            if isinstance(event, ev.VersionRestored):
                return event
        return None

    def steps_from(self, number: int) -> Iterator[Step]:
        """Live committed and skipped steps, newest first, back to that which made version `number`."""
        for low, high in reversed(self.live_steps()):
            for position in range(high - 1, low - 1, -1):
                record = self.steps.read(position, position + 1)[0]
                if record.number < number:
                    return
                event = self.event(record)
                if isinstance(event, ev.StepCommitted | ev.StepSkipped):
                    yield event

    def event(self, record: Record) -> ev.Event | None:
        """The event of a record; None when its line is damaged."""
        return _event(self.segments.read(_place(record)))


def _place(record: Record) -> LinePlace:
    return LinePlace(record.segment, record.offset, record.length)


def _event(line: bytes) -> ev.Event | None:
    try:
        return ev.decode(line)
    except msgspec.DecodeError:
        return None


def _number(line: bytes) -> int:
    head = line.partition(b" ")[0]
    return int(head) if head.isdigit() else -1
