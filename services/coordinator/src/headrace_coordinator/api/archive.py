"""Writes the last view of each ended run to a file beside its history, and leaves a few fields of it in the state."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

from headrace_schema.resources.views import RunView

from headrace_coordinator.api.reading.presenters import run_view
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import SUMMARY
from headrace_coordinator.waits import WaitTimeout

RETRY_S = 1.0


class Archive:
    """Archives runs that have ended and are not `busy`, and shows archived ones."""

    def __init__(self, event_log: EventLog, busy: Callable[[str], bool]) -> None:
        """`busy`: a controller is at work for the run."""
        self._event_log = event_log
        self._busy = busy

    def _due(self) -> list[RunState]:
        return [
            run
            for run in self._event_log.state.runs.values()
            if run.state in run_states.TERMINAL and run.grant is None and not self._busy(run.id)
        ]

    async def run(self) -> None:
        """Archives for ever."""
        while True:
            with contextlib.suppress(WaitTimeout):
                await self._event_log.wait_until(lambda: bool(self._due()), 3600.0, "a run to end")
            await self.once()

    async def once(self) -> None:
        """Archives what is due now. Files first: only what is in them may leave the state."""
        for run in self._due():
            await self._event_log.flush()
            await self._event_log.history.written()
            data = run_view(run, []).model_dump_json().encode()
            try:
                await self._event_log.history.sweep(run.id)
                await self._event_log.history.write_beside(run.id, SUMMARY, data)
            except OSError:
                await asyncio.sleep(RETRY_S)  # The next attempt waits in `synced` for a disk that refuses.
                continue
            archived = ev.RunArchived(
                run=run.id,
                state=run.state,
                created_at=run.created_at,
                evaluation=run.evaluation is not None,
                owner=run.owner,
                team=run.team,
                visibility=run.visibility,
            )
            await self._event_log.commit(archived)
            self._event_log.history.forget(run.id)

    def view(self, run_id: str) -> RunView:
        """An archived run; CONFLICT when its summary cannot be read: another try would find the same."""
        path = self._event_log.history.directory(run_id) / SUMMARY
        try:
            view = RunView.from_json(json.loads(path.read_bytes()))
            # The data directory may have been moved since the run ended.
            return view.model_copy(update={"run_directory": str(path.parents[1])})
        except (OSError, ValueError, TypeError) as error:
            message = f"the summary of run {run_id} cannot be read: {path}: {error}; mend the file, or delete the run"
            raise Refused("CONFLICT", message) from error
