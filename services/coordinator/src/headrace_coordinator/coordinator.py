"""The coordinator: starts and stops run loops, answers the HTTP API, scales the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace_coordinator import present
from headrace_coordinator.admission import FleetView, check
from headrace_coordinator.control import Refused
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import runs
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet import RESTART_S, Fleet
from headrace_coordinator.kernel import Kernel
from headrace_coordinator.problems import Impossible
from headrace_coordinator.projections import RunProjection
from headrace_coordinator.reads import ACTIVE, Reads
from headrace_coordinator.run.context import Projection, RunContext
from headrace_coordinator.run.loop import RunLoop
from headrace_coordinator.spec import RunSpec
from headrace_coordinator.trial import try_scorers
from headrace_coordinator.views import KeyProblemView, RunView
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
SCALE_TIMEOUT_S = 30.0
MakeProjection = Callable[[Path], Projection]
OpenDataset = Callable[[RunSpec], Awaitable[Dataset]]


class Coordinator(Reads):
    """Implements `control.Control` on a kernel and a fleet. One run is active at a time; others are queued."""

    def __init__(
        self,
        kernel: Kernel,
        fleet: Fleet,
        data_dir: Path,
        make_projection: MakeProjection = RunProjection,
        open_dataset: OpenDataset | None = None,
    ) -> None:
        super().__init__(kernel, fleet, lambda run: run in self._tasks)
        self._data_dir = data_dir
        self._make_projection = make_projection
        self._open_dataset = open_dataset or _open_dataset
        self._loops: dict[str, RunLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scaled: dict[str, tuple[int, str]] = {}

    # --- run loops

    async def schedule(self) -> None:
        """Starts the next run whenever none is active, for ever; after a restart, the one that was active."""
        while True:
            active = [run for run in self._all() if run.state in ACTIVE]
            queued = [run for run in self._all() if run.state == runs.QUEUED]
            for run in active or queued[:1]:
                if run.id not in self._tasks:
                    self._tasks[run.id] = asyncio.create_task(self._run(run), name=f"run {run.id}")
            with contextlib.suppress(WaitTimeout):
                await self.kernel.wait_until(self._work_to_start, 3600.0, "a run to start")

    def _work_to_start(self) -> bool:
        states = self.kernel.state.runs.values()
        if any(run.state in ACTIVE and run.id not in self._tasks for run in states):
            return True
        idle = not any(run.state in ACTIVE for run in states) and not self._tasks
        return idle and any(run.state == runs.QUEUED for run in states)

    async def _run(self, run: RunState) -> None:
        projection: Projection | None = None
        try:
            spec = RunSpec.model_validate(run.spec)
            dataset = await self._open_dataset(spec)
            if not await self._same_data(run, dataset):
                return
            projection = self._make_projection(Path(run.directory))
            projection.spec(run.spec)
            loop = RunLoop(RunContext(self.kernel, self.fleet, run.id, dataset, projection))
            self._loops[run.id] = loop
            if run.state == runs.CANCELLING:
                loop.interrupt.set_result("cancelled")
            await loop.run()
        except Impossible as error:
            self.kernel.post(*runs.plan_move(run, runs.FAILED, str(error), self.kernel.now()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("run %s broke", run.id)
            reason = f"a bug in the coordinator ended the run: {type(error).__name__}: {error}"
            await self.fleet.desk.release_all(run.id)
            self.fleet.unclaim(run.id)
            self.kernel.post(*runs.plan_move(run, runs.FAILED, reason, self.kernel.now()))
        finally:
            if projection is not None:
                projection.close()
            self._loops.pop(run.id, None)
            self._tasks.pop(run.id, None)
            self.kernel.wake()

    async def _same_data(self, run: RunState, dataset: Dataset) -> bool:
        """The items are those that the run began with; else it is paused, since its slots would mean other prompts."""
        now = self.kernel.now()
        if not run.dataset_digest:
            await self.kernel.commit(ev.DatasetOpened(at=now, run=run.id, digest=dataset.digest))
        if run.dataset_digest == dataset.digest or run.state == runs.CANCELLING:
            return True
        reason = (
            "data.source: its items are not those that the run began with; put them back and resume, "
            "or submit a new run"
        )
        for state in (runs.PAUSING, runs.PAUSED):
            await self.kernel.commit(*runs.plan_move(run, state, reason, now))
        return False

    async def stop(self) -> None:
        """Ends the loops where they are; a restart resumes their runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- Control: writes

    async def check(self, spec: RunSpec) -> list[KeyProblemView]:
        """See `Control.check`. An instance that is just being restarted is waited for."""
        if self._misfits(spec) and self.fleet.restarting():
            with contextlib.suppress(WaitTimeout):
                await self.kernel.wait_until(
                    lambda: not self._misfits(spec), RESTART_S, "instances to be restarted"
                )
        return self._misfits(spec) or await try_scorers(spec, self.fleet)

    def _misfits(self, spec: RunSpec) -> list[KeyProblemView]:
        return check(spec, FleetView.of(present.instance_views(self.fleet)))

    async def submit(self, spec: RunSpec, idempotency_key: str) -> RunView:
        """See `Control.submit`."""
        body = _digest(spec.model_dump(mode="json"))
        if known := self._known(idempotency_key, body):
            return self.run(known)
        if problems := await self.check(spec):
            raise Refused("INVALID", "the fleet cannot run this spec", problems)
        run_id = f"{spec.name}-{uuid.uuid4().hex[:6]}"
        now = self.kernel.now()
        await self.kernel.commit(
            ev.RunSubmitted(
                at=now,
                run=run_id,
                spec=spec.model_dump(mode="json"),
                directory=str(self._data_dir / "runs" / run_id),
            ),
            ev.KeyUsed(at=now, key=idempotency_key, body=body, resource=run_id),
        )
        return self.run(run_id)

    def _known(self, key: str, body: str) -> str:
        record = self.kernel.state.key(key, self.kernel.now())
        if record is None:
            return ""
        if record.body != body:
            raise Refused("CONFLICT", f"Idempotency-Key {key} was used for another request; use a new key")
        return record.resource

    async def pause(self, run_id: str, now: bool, idempotency_key: str) -> RunView:
        """See `Control.pause`."""
        moved = await self._move(run_id, runs.PAUSING, "pause asked for", idempotency_key, f"pause now={now}")
        loop = self._loops.get(run_id)
        if moved and now and loop and not loop.interrupt.done():
            loop.interrupt.set_result("paused at once")
        return self.run(run_id)

    async def resume(self, run_id: str, idempotency_key: str) -> RunView:
        """See `Control.resume`."""
        if self._known(idempotency_key, _digest([run_id, "resume"])):
            return self.run(run_id)
        run = self._find(run_id)
        if run.state not in (runs.PAUSED, runs.PLANNING, runs.RUNNING):
            raise Refused("CONFLICT", f"run {run_id} is {run.state}; only a PAUSED run can be resumed")
        if run.state == runs.PAUSED:
            await self._move(run_id, runs.PLANNING, "resumed", idempotency_key, "resume")
        return self.run(run_id)

    async def cancel(self, run_id: str, idempotency_key: str) -> RunView:
        """See `Control.cancel`."""
        if self._known(idempotency_key, _digest([run_id, "cancel"])):
            return self.run(run_id)
        idle = self._find(run_id).state in (runs.QUEUED, runs.PAUSED)
        moved = await self._move(run_id, runs.CANCELLING, "cancel asked for", idempotency_key, "cancel")
        loop = self._loops.get(run_id)
        if moved and loop and not loop.interrupt.done():
            loop.interrupt.set_result("cancelled")
        elif moved and idle and run_id not in self._tasks:
            await self._move(run_id, runs.CANCELLED, "cancelled by its user", "", "")
        return self.run(run_id)

    async def _move(self, run_id: str, state: str, reason: str, key: str, body: str) -> bool:
        """False for a repeated request, which changes nothing."""
        if key and self._known(key, _digest([run_id, body])):
            return False
        run = self._find(run_id)
        now = self.kernel.now()
        try:
            events = runs.plan_move(run, state, reason, now)
        except runs.IllegalTransition as error:
            raise Refused("CONFLICT", str(error)) from error
        if key:
            events.append(ev.KeyUsed(at=now, key=key, body=_digest([run_id, body]), resource=run_id))
        await self.kernel.commit(*events)
        return True

    async def scale(self, kind: str, count: int, idempotency_key: str) -> int:
        """See `Control.scale`."""
        supervisor = next((s for s in self.fleet.supervisors.values() if kind in s.scalable), None)
        if supervisor is None:
            raise Refused("UNAVAILABLE", f"no connected supervisor can change the number of {kind} processes")
        supervisor.send("scale", (idempotency_key, kind, count))
        try:
            await self.kernel.wait_until(
                lambda: idempotency_key in self._scaled, SCALE_TIMEOUT_S, f"{supervisor.host} to scale {kind}"
            )
        except WaitTimeout as timeout:
            raise Refused("UNAVAILABLE", str(timeout)) from timeout
        wanted, error = self._scaled.pop(idempotency_key)
        if error:
            raise Refused("INVALID", error)
        return wanted

    def scaled(self, request_id: str, kind: str, count: int, error: str) -> None:
        """A supervisor answered a scale command."""
        self._scaled[request_id] = (count, error)
        self.kernel.wake()


async def _open_dataset(spec: RunSpec) -> Dataset:
    return await asyncio.to_thread(Dataset.open, spec.data, spec.seed)


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]
