"""Recordings of a run's steps: those that there are, and steps of which one is asked for. They are files of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace_schema.resources.views import RecordingListView, RecordingView
from headrace_servicekit.recording.files import SUFFIX, BadRecording, read_header
from headrace_servicekit.recording.recorder import Recorder, read_wanted, write_wanted

from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain.run_states import TERMINAL
from headrace_coordinator.run.recording import FOLDER


class Recordings:
    """The recordings of all runs; `recorder` has those of the runs that work."""

    def __init__(self, reads: Reads, recorder: Recorder) -> None:
        self._reads, self._recorder = reads, recorder

    def all(self, run_id: str) -> RecordingListView:
        """Those of a run, newest first, and the steps that were asked for and are not made yet."""
        directory = self._directory(run_id)
        found = sorted(_views(directory), key=lambda view: (view.kept_at, view.name), reverse=True)
        ended = self._reads.run(run_id).state in TERMINAL
        return RecordingListView(recordings=found, wanted=[] if ended else sorted(read_wanted(directory)))

    def path(self, run_id: str, name: str) -> Path:
        """The file of one; Refused NOT_FOUND names those that there are."""
        return self._directory(run_id) / self._named(run_id, name).name

    def checkpoint(self, run_id: str, name: str) -> Path:
        """The folder of the checkpoint that one begins with, which stays as long as it; Refused NOT_FOUND without."""
        found = self._named(run_id, name)
        if not found.checkpoint:
            raise Refused("NOT_FOUND", f"{name} of run {run_id} begins with no checkpoint")
        return self._directory(run_id).parent / "checkpoints" / found.checkpoint

    def _named(self, run_id: str, name: str) -> RecordingView:
        known = {view.name: view for view in self.all(run_id).recordings}
        if name not in known:
            have = f"it has {', '.join([*known][:5])}" if known else "it has none"
            raise Refused("NOT_FOUND", f"run {run_id} has no recording {name!r}; {have}")
        return known[name]

    def ask(self, run_id: str, step: int) -> RecordingListView:
        """Has a step that is not made yet recorded; durable. What is asked for twice is recorded once.

        Raises:
            Refused: CONFLICT for an evaluation, an ended run, or a step that is made already or too late to be heard;
                UNAVAILABLE where the disk refuses the note.
        """
        run = self._reads.run(run_id)
        if run.state in TERMINAL:
            raise Refused(
                "CONFLICT", f"run {run_id} is {run.state}: none of its steps can be recorded any more"
            )
        state = self._reads.find(run_id)
        if state.evaluation is not None:
            raise Refused("CONFLICT", f"{run_id} is an evaluation: it makes no steps that could be recorded")
        recorder, steps = self._recorder.of(f"runs/{run_id}"), int(state.spec["steps"])
        first = state.ledger.step + 1 if recorder is None else recorder.first_step(state.ledger.step + 1)
        if not first <= step <= steps:
            made = (
                f"step {step} is made, or begun, and was not recorded"
                if step < first
                else "there is no such step"
            )
            fix = f"ask for one of {first} to {steps}" if first <= steps else "its last step has begun"
            raise Refused("CONFLICT", f"{made}; {fix}, or set recording.keep in the run's spec")
        try:
            if recorder is not None:
                recorder.ask([step])
            else:
                directory = self._directory(run_id)
                write_wanted(directory, read_wanted(directory) | {step})
        except OSError as error:
            raise Refused("UNAVAILABLE", f"the disk refuses it: {error.strerror}; try again") from error
        return self.all(run_id)

    def _directory(self, run_id: str) -> Path:
        return Path(self._reads.run(run_id).run_directory) / FOLDER


def _views(directory: Path) -> Iterator[RecordingView]:
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            header, size = read_header(path), path.stat().st_size
        except (BadRecording, OSError):
            continue  # Dropped meanwhile, or of another version.
        yield RecordingView(
            name=path.name,
            step=header.step,
            reason=header.reason,
            size_bytes=size,
            kept_at=header.kept_at,
            checkpoint=header.base.checkpoint,
            incomplete=header.incomplete,
        )
