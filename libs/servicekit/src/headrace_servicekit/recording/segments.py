"""What was said in a run's newest steps: a file a step, written on a thread, the oldest dropped beyond a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.common.v1 import recording_pb2

from headrace_servicekit.folders import remove_below
from headrace_servicekit.recording.files import Member, write_recording

PENDING_BYTES = 256 << 20
"""Most that waits for the thread; what comes then is left out."""


@dataclass(eq=False)
class _Segment:
    step: int
    number: int
    member: Member


class Segments:
    """The segments in `directory`, a folder below `root`, of at most `max_bytes` together.

    What is there of another process is removed.
    `trouble` is what the disk said when it refused one: nothing is written any more.
    """

    def __init__(self, root: Path, directory: Path, max_bytes: int) -> None:
        self._root = root
        self._directory, self._max_bytes = directory, max_bytes
        self.number = 1
        """Number of the segment that is being written."""
        self.trouble = ""
        self._kept: list[_Segment] = []
        self._thread: ThreadPoolExecutor | None = None
        self._given = self._taken = 0

    def write(self, part: recording_pb2.RecordedPart, step: int) -> bool:
        """Appends a part; False where it is left out, since the disk is too slow or the segment too large."""
        size = part.ByteSize()
        if self.trouble or self._given - self._taken > PENDING_BYTES:
            return False
        if not self._kept or self._kept[-1].number != self.number:
            path = self._directory / f"{self.number:08d}.gz"
            self._kept.append(_Segment(step, self.number, Member(self._root, path)))
        segment = self._kept[-1]
        if segment.member.size > self._max_bytes:
            return False
        self._given += size
        self._on_thread(self._add, segment.member, part, size)
        return True

    def next(self) -> None:
        """Ends the segment; what is written from now on goes into another one."""
        self.number += 1
        if self._kept:
            self._on_thread(self._kept[-1].member.close)

    def drop_through(self, step: int) -> None:
        """Drops the segments of steps up to `step`."""
        self._drop(lambda segment: segment.step <= step)

    def drop_ended(self) -> None:
        """Drops all but the one that is written."""
        self._drop(lambda segment: segment.number != self.number)

    def drop_beyond_budget(self) -> bool:
        """Drops the oldest while all together are too large; whether one was."""
        over = sum(segment.member.size for segment in self._kept) - self._max_bytes
        last = 0
        for segment in self._kept[:-1]:
            if over <= 0:
                break
            over, last = over - segment.member.size, segment.number
        self._drop(lambda segment: segment.number <= last)
        return bool(last)

    async def put_together(
        self,
        path: Path,
        header: recording_pb2.RecordingHeader,
        opening: Sequence[recording_pb2.RecordedPart],
        then: Callable[[], Any],
    ) -> int:
        """Writes the segments that have ended into one recording, and then calls `then` on the thread; its bytes.

        0 where the disk refused it, which `trouble` says.
        """
        members = [segment.member for segment in self._kept if segment.number != self.number]

        def work() -> int:
            size = write_recording(self._root, path, header, opening, members)
            then()
            return size

        return await asyncio.wrap_future(self._on_thread(work)) or 0

    def close(self) -> None:
        """Drops everything."""
        self._kept.clear()
        if self._thread is not None:
            self._on_thread(remove_below, self._root, self._directory)
            self._thread.shutdown(wait=False)
            self._thread = None

    def _drop(self, unneeded: Callable[[_Segment], bool]) -> None:
        for segment in [each for each in self._kept if unneeded(each)]:
            self._kept.remove(segment)
            self._on_thread(segment.member.remove)

    def _add(self, member: Member, part: recording_pb2.RecordedPart, size: int) -> None:
        self._taken += size  # The thread alone changes it.
        member.add(part)

    def _on_thread(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recording")
            self._thread.submit(self._empty_directory)

        def guarded() -> Any:
            try:
                return work(*arguments)
            except OSError as error:
                self.trouble = self.trouble or f"{error.filename or self._directory}: {error.strerror}"
                return None

        return self._thread.submit(guarded)

    def _empty_directory(self) -> None:
        remove_below(self._root, self._directory)
