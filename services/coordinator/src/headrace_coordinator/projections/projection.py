"""The files of one run: metrics.jsonl, trajectories.jsonl, timeline.jsonl, tensorboard/ and run.json.

They are derived, so they never delay a run: a thread writes them, what does not fit its queue is dropped and counted,
and a failing disk is logged once and counted. Writing again what was written before a restart adds nothing.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import StepView
from headrace_schema.sections.tracking import TrackingSection

from headrace_coordinator.projections.lines import LineFile, read_lines, write_whole
from headrace_coordinator.projections.tensorboard import EventFile, evaluation_scalars, step_scalars
from headrace_coordinator.projections.thumbnails import thumbnails, with_thumbnails
from headrace_coordinator.projections.timeline import Part, TimelineFile
from headrace_coordinator.projections.trajectories import SettledTrajectory, TrajectoryFile

log = logging.getLogger(__name__)
QUEUE_LENGTH = 1024
SEEN_KEPT, SEEN_BYTES = 1024, 1 << 20
USUAL = TrackingSection()
Work = Callable[[], None]
Images = tuple[bytes, ...]


class _MetricsKey(msgspec.Struct, frozen=True):
    type: Literal["step", "evaluation"]
    step: int
    version: int
    kind: str = ""


class RunProjection:
    """Writes a run's files in `directory`. Its methods return at once and never raise."""

    def __init__(
        self,
        directory: Path,
        tracking: TrackingSection = USUAL,
        *,
        trajectory_file_bytes: int = 16 * 1024 * 1024,
        trajectory_files: int = 4,
    ) -> None:
        self.directory = directory
        self.failures = 0
        self.trouble = ""
        """Why the disk refused the last write; "" when it did not."""
        self._limits = (tracking.trajectories_per_step, trajectory_file_bytes, trajectory_files)
        self._queue: queue.Queue[Work | None] = queue.Queue(QUEUE_LENGTH)
        self._closed = False
        self._metrics: LineFile | None = None
        self._trajectories: TrajectoryFile | None = None
        self._timeline: TimelineFile | None = None
        self._board = EventFile(directory / "tensorboard")
        self._seen: dict[_MetricsKey, None] = {}
        self._thread = threading.Thread(target=self._work, name=f"projection-{directory.name}", daemon=True)
        self._thread.start()

    def spec(self, spec: dict[str, Any]) -> None:
        """Writes run.json."""
        self._put(lambda: self._write_spec(spec))

    def step(self, view: StepView) -> None:
        """Adds a committed step; after a rewind the same step has a new version and becomes another line."""
        line = _MetricsKey("step", view.step, view.version)
        self._put(lambda: self._write_metrics(line, view, step_scalars(view)))

    def evaluation(self, view: EvaluationView) -> None:
        """Adds an evaluation."""
        line = _MetricsKey("evaluation", view.step, view.version, view.kind)
        self._put(lambda: self._write_metrics(line, view, evaluation_scalars(view)))

    def trajectories(
        self, views: list[SettledTrajectory], images: Mapping[int, Images] | None = None
    ) -> None:
        """Adds settled trajectories; the file keeps a sample of them. `images` are those of prompts by ordinal."""
        self._put(lambda: self._write_trajectories(views, images or {}))

    def timeline(self, part: Part) -> None:
        """Adds a part of the timeline."""
        self._put(lambda: self._write_timeline(part))

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until everything so far is written or has failed; false when that takes too long."""
        done = threading.Event()
        return self._put(done.set) and done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Writes what is queued and ends."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            self._fail("the queue did not drain")
            return
        self._thread.join(timeout)

    def _put(self, work: Work) -> bool:
        try:
            if not self._closed:
                self._queue.put_nowait(work)
                return True
        except queue.Full:
            self._fail("the disk is too slow, so lines are left out")
        return False

    def _work(self) -> None:
        while work := self._queue.get():
            try:
                work()
            except OSError as error:
                self.trouble = str(error)
                self._fail(str(error))
            except ValueError as error:  # Text that no encoding holds.
                self._fail(str(error))
            else:
                self.trouble = ""
        self._board.close()

    def _fail(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning(
                "files under %s are incomplete: %s (logged once; the run goes on)", self.directory, why
            )

    def _write_spec(self, spec: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / "run.json", json.dumps(spec, indent=2).encode())

    def _write_metrics(
        self, line: _MetricsKey, view: StepView | EvaluationView, scalars: dict[str, float]
    ) -> None:
        if self._metrics is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._metrics, self._seen = _open_metrics(self.directory / "metrics.jsonl")
        if line in self._seen:
            return
        record = {"type": line.type, **view.model_dump(mode="json")}
        self._metrics.append([json.dumps(_finite(record), ensure_ascii=False).encode()])
        self._seen[line] = None
        if len(self._seen) > SEEN_KEPT:
            del self._seen[next(iter(self._seen))]
        self._board.write(time.time(), view.step, scalars)

    def _write_trajectories(self, views: list[SettledTrajectory], images: Mapping[int, Images]) -> None:
        if self._trajectories is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._trajectories = TrajectoryFile(self.directory, *self._limits)
        if images:
            small = {ordinal: thumbnails(own) for ordinal, own in images.items()}
            views = [msgspec.structs.replace(each, images=small[each.prompt_ordinal]) for each in views]
        views = [
            msgspec.structs.replace(each, messages=with_thumbnails(each.messages))
            if any(message.files for message in each.messages)
            else each
            for each in views
        ]
        self._trajectories.append(views)

    def _write_timeline(self, part: Part) -> None:
        if self._timeline is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._timeline = TimelineFile(self.directory)
        self._timeline.append(part)


def _open_metrics(path: Path) -> tuple[LineFile, dict[_MetricsKey, None]]:
    """The file, and the keys of its last lines: a restart writes no older ones again."""
    decode = msgspec.json.Decoder(_MetricsKey).decode
    seen: dict[_MetricsKey, None] = {}
    for _, line in read_lines(path, max(0, LineFile(path).size() - SEEN_BYTES)):
        try:
            seen[decode(line)] = None
        except msgspec.DecodeError:
            continue  # A torn line counts as missing: its step is written again.
    return LineFile(path), seen


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON cannot express."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
