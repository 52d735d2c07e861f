"""Which steps of a run are recorded, and where their recordings begin. What is said the fleet's `recorder` hears."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.common.v1 import recording_pb2
from headrace_servicekit.recording.files import SUFFIX, BadRecording, read_header
from headrace_servicekit.recording.recorder import Description, Kept, RunRecorder

if TYPE_CHECKING:
    from headrace_coordinator.run.context import RunContext

log = logging.getLogger(__name__)
FOLDER = "recordings"


class StepRecording:
    """The recordings of one run at work."""

    def __init__(self, context: RunContext) -> None:
        self._context, section = context, context.spec.recording
        recorder = RunRecorder(
            f"runs/{context.run_id}",
            Path(context.state.directory) / FOLDER,
            section.keep,
            section.max_bytes,
            section.max_count,
        )
        self._recorder = context.fleet.recorder.open(recorder)
        self._trouble = ""

    @property
    def _next_step(self) -> int:
        return self._context.state.ledger.step + 1

    def due(self) -> bool:
        """Whether a checkpoint is to be made before the next step, for a recording to begin with."""
        return not self._context.finished and self._recorder.needs_base(self._next_step)

    def not_based(self, reason: str) -> None:
        """The head cannot be saved: the run goes on, and so does the recording, without a beginning."""
        self._recorder.not_based(reason)

    def based_on_head(self) -> None:
        """The head is saved: what is said from now on follows from its checkpoint."""
        state = self._context.state
        if state.checkpoints:
            self._based(*state.checkpoints[-1], state.ledger.step)
        else:
            self.not_based("there is no version yet that a checkpoint could have")

    def saved(self, name: str, number: int, step: int) -> None:
        """A checkpoint of version `number`, made by `step` steps, is durable."""
        if self._context.spec.recording.keep != "none":  # Else the steps since then were not heard.
            self._based(name, number, step)

    def _based(self, name: str, number: int, step: int) -> None:
        version = self._context.state.lineage.versions.get(number)
        self._recorder.based(name, number, version.digest if version else "", step)

    def bases(self) -> list[str]:
        """Names of the checkpoints that recordings begin with: they stay as long as these."""
        base = self._recorder.base
        found = {base.checkpoint} if base is not None else set[str]()
        for path in self._recorder.directory.glob(f"*{SUFFIX}"):
            try:
                found.add(read_header(path).base.checkpoint)
            except BadRecording as damaged:
                log.warning("%s", damaged)
        return sorted(found - {""})

    def begin(self) -> None:
        """The next step begins."""
        if not self._context.finished:
            self._recorder.begin(self._next_step)

    def fails(self, reason: str) -> None:
        """Something of the open step has failed."""
        self._recorder.fails(reason)

    async def failed(self, reason: str) -> None:
        """The open step has failed as a whole."""
        self._recorder.fails(self._context.fleet.readable(reason))
        await self.end()

    async def end(self) -> None:
        """The step is over: tells the run's user where it is kept, or why it is not."""
        context = self._context
        kept: Kept | None = await self._recorder.end(self._described)
        if kept is not None:
            context.note(
                f"step {self._recorder.step} is recorded ({kept.size / 1e6:.1f} MB): headrace record {context.run_id} "
                f"--step {self._recorder.step}",
                plain=True,
            )
        if self._recorder.trouble != self._trouble:
            self._trouble = self._recorder.trouble
            context.note(f"nothing more is recorded: {self._trouble}")

    def _described(self) -> Description:
        instances = [
            recording_pb2.RecordedInstance(
                kind=worker.instance.kind,
                name=worker.instance.instance,
                incarnation=worker.incarnation,
                devices=worker.devices,
            )
            for worker in self._context.workers.everyone
        ]
        return json.dumps(self._context.state.spec), instances

    def close(self) -> None:
        """The run leaves."""
        self._context.fleet.recorder.close(self._recorder)
