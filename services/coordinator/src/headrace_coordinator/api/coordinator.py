"""The coordinator: starts and stops run loops, answers the HTTP API, scales the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from headrace_schema.changing import RunChange
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, nearest
from headrace_schema.resources.evaluations import EvaluationRunView
from headrace_schema.resources.views import KeyProblemView, RunView
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.changing import plan_ranks
from headrace_coordinator.api.control import Refused
from headrace_coordinator.api.reading import presenters as present
from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.scaling import Scaling
from headrace_coordinator.api.submission.admission import FleetView, check, check_alone
from headrace_coordinator.api.submission.engines import answer_problems, settle_engine
from headrace_coordinator.api.submission.environment_check import try_environment
from headrace_coordinator.api.submission.evaluations import Prepared, in_users_keys, prepare
from headrace_coordinator.api.submission.scorer_check import try_scorers
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.runs import SuiteEvaluation
from headrace_coordinator.fleet.fleet import RESTART_S, Fleet
from headrace_coordinator.fleet.reconciler import Reconciler
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.scheduler import MakeProjection, OpenDataset, Scheduler
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.suites import open_suite
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
INTENT_SHOWN_S = 2.0
"""How long a write that changes an intent waits for the run to follow it, so that its answer shows that."""


class Coordinator(Reads):
    """Implements `control.Control` on an event log and a fleet."""

    def __init__(
        self,
        event_log: EventLog,
        fleet: Fleet,
        data_dir: Path,
        make_projection: MakeProjection = RunProjection,
        open_dataset: OpenDataset | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:6],
    ) -> None:
        super().__init__(
            event_log, fleet, lambda run: run in self.scheduler.tasks, lambda: self.scheduler.plan
        )
        self._data_dir = data_dir
        self._new_id = new_id
        self.scheduler = Scheduler(event_log, fleet, make_projection, open_dataset or _open_dataset)
        self.reconciler = Reconciler(fleet)
        self._writes: dict[str, asyncio.Lock] = {}
        self.scaling = Scaling(fleet, self._known)

    async def schedule(self) -> None:
        """Admits and runs whatever may run, for ever."""
        await self.scheduler.run()

    async def stop(self) -> None:
        """Ends the controllers where they are; a restart resumes their runs."""
        await self.scheduler.stop()
        await self.reconciler.stop()

    # --- Control: writes

    async def check(self, spec: RunSpec) -> list[KeyProblemView]:
        """See `Control.check`. An instance that is just being restarted is waited for."""
        return await self._check(spec, trains=True)

    def settle(self, spec: RunSpec) -> tuple[RunSpec, str]:
        """See `Control.settle`."""
        return settle_engine(spec, self._fleet_view)

    @property
    def _fleet_view(self) -> FleetView:
        return FleetView.of(present.instance_views(self.fleet))

    async def _check(self, spec: RunSpec, *, trains: bool) -> list[KeyProblemView]:
        def misfits() -> list[KeyProblemView]:
            return check(self.settle(spec)[0], self._fleet_view, trains=trains)

        if misfits() and self.fleet.restarting() and not check_alone(spec, trains=trains):
            with contextlib.suppress(WaitTimeout):
                await self.event_log.wait_until(lambda: not misfits(), RESTART_S, "instances to be restarted")
        problems = [*misfits(), *await self.fork_problems(spec)]
        problems = problems or await try_scorers(spec, self.fleet, self.reconciler.trials)
        problems = problems or await try_environment(spec, self.fleet, self.reconciler.trials)
        # A trial may take a minute, in which a fork's origin goes on and deletes checkpoints.
        return problems or await self.fork_problems(spec)

    async def submit(self, spec: RunSpec, idempotency_key: str) -> RunView:
        """See `Control.submit`."""
        body = _digest(spec.model_dump(mode="json"))
        async with self._write(idempotency_key):
            if known := self._known(idempotency_key, body):
                return self.run(known)
            if problems := await self.check(spec):
                raise Refused("INVALID", "the fleet cannot run this spec", problems)
            return self.run(await self._queue_run(spec, idempotency_key, body))

    async def _queue_run(
        self, spec: RunSpec, key: str, body: str, evaluation: SuiteEvaluation | None = None
    ) -> str:
        run_id, now = f"{spec.name}-{self._new_id()}", self.event_log.now()
        spec, why = self.settle(spec)
        notes = [ev.Noted(at=now, run=run_id, text=why)] if why else []
        submitted = ev.RunSubmitted(
            at=now,
            run=run_id,
            spec=spec.model_dump(mode="json"),
            directory=str(self._data_dir / "runs" / run_id),
            evaluation=None if evaluation is None else msgspec.to_builtins(evaluation),
        )
        used = ev.KeyUsed(at=now, key=key, body=body, resource=run_id)
        await self.event_log.commit(submitted, used, *notes)
        return run_id

    async def check_evaluation(self, asked: EvaluationSpec) -> list[KeyProblemView]:
        """See `Control.check_evaluation`."""
        try:
            await self._prepare(asked)
        except Impossible as error:
            return error.problems
        return []

    async def submit_evaluation(self, asked: EvaluationSpec, idempotency_key: str) -> EvaluationRunView:
        """See `Control.submit_evaluation`."""
        body = _digest(["evaluation", asked.model_dump(mode="json")])
        async with self._write(idempotency_key):
            run_id = self._known(idempotency_key, body)
            if not run_id:
                try:
                    prepared = await self._prepare(asked)
                except Impossible as error:
                    message = "the fleet cannot make this evaluation"
                    raise Refused("INVALID", message, error.problems) from error
                run_id = await self._queue_run(prepared.spec, idempotency_key, body, prepared.evaluation)
        return self.suite_evaluation(run_id)

    async def _prepare(self, asked: EvaluationSpec) -> Prepared:
        """The run of an evaluation; raises `Impossible`."""
        prepared = await prepare(asked, *await self.checkpoint_of(asked))
        if problems := await self._check(prepared.spec, trains=False):
            suite = open_suite(asked.suite.name, asked.suite.options)
            raise Impossible(in_users_keys(problems, suite))
        engine = self.settle(prepared.spec)[0].rollout.engine
        if problems := list(answer_problems(asked.sampling, engine, self._fleet_view)):
            raise Impossible(problems)
        return prepared

    @contextlib.asynccontextmanager
    async def _write(self, key: str) -> AsyncIterator[None]:
        """Requests with one key go one after the other: the second finds what the first has recorded."""
        lock = self._writes.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._writes.pop(key, None)

    def _known(self, key: str, body: str) -> str:
        record = self.event_log.state.key(key, self.event_log.now())
        if record is None:
            return ""
        if record.body != body:
            raise Refused("CONFLICT", f"Idempotency-Key {key} was used for another request; use a new key")
        return record.resource

    async def pause(self, run_id: str, now: bool, idempotency_key: str) -> RunView:
        """See `Control.pause`."""
        intent = run_states.PAUSE_NOW if now else run_states.PAUSE
        return await self._intend(run_id, intent, idempotency_key, f"pause now={now}")

    async def resume(self, run_id: str, idempotency_key: str) -> RunView:
        """See `Control.resume`."""
        return await self._intend(run_id, run_states.RUN, idempotency_key, "resume")

    async def cancel(self, run_id: str, idempotency_key: str) -> RunView:
        """See `Control.cancel`."""
        return await self._intend(run_id, run_states.CANCEL, idempotency_key, "cancel")

    async def change(self, run_id: str, change: RunChange, idempotency_key: str) -> RunView:
        """See `Control.change`. The run's controller makes the change between two steps."""
        body = _digest([run_id, change.model_dump(mode="json")])
        async with self._write(idempotency_key):
            if not self._known(idempotency_key, body):
                run, now = self._find(run_id), self.event_log.now()
                events = plan_ranks(self.event_log.state, run, change.trainer.ranks, self._fleet_view, now)
                used = ev.KeyUsed(at=now, key=idempotency_key, body=body, resource=run_id)
                await self.event_log.commit(*events, used)
        return self.run(run_id)

    async def _intend(self, run_id: str, intent: str, key: str, body: str) -> RunView:
        """Records what the user wants, and the key with it; the run's controller follows."""
        body = _digest([run_id, body])
        if self._known(key, body):
            return self.run(run_id)
        run = self._find(run_id)
        now = self.event_log.now()
        try:
            events = runs.plan_intent(run, intent, "user", f"{intent} asked for", now)
        except run_states.IllegalIntent as error:
            raise Refused("CONFLICT", str(error)) from error
        await self.event_log.commit(*events, ev.KeyUsed(at=now, key=key, body=body, resource=run_id))
        with contextlib.suppress(WaitTimeout):
            await self.event_log.wait_until(
                lambda: runs.next_action(run).kind != run_states.MOVE, INTENT_SHOWN_S, "the run to follow"
            )
        return self.run(run_id)

    async def drain(self, name: str, idempotency_key: str) -> str:
        """See `Control.drain`. The key is recorded with the incarnation: a later process of the name is another."""
        body = _digest(["drain", name])
        async with self._write(idempotency_key):
            incarnation = self._known(idempotency_key, body)
            if not incarnation:
                incarnation = self._drainable(name)
                used = ev.KeyUsed(
                    at=self.event_log.now(), key=idempotency_key, body=body, resource=incarnation
                )
                await self.fleet.drain(incarnation, used)
        return incarnation

    def _drainable(self, name: str) -> str:
        """The incarnation of a connected instance."""
        known = [i for i in self.event_log.state.instances.values() if i.instance == name]
        if not known:
            close = nearest(name, {i.instance for i in self.event_log.state.instances.values()})
            message = f"there is no instance {name[:40]!r}" + (f"; did you mean {close}?" if close else "")
            raise Refused("NOT_FOUND", message)
        alive = [i.incarnation for i in known if self.fleet.alive(i.incarnation)]
        if not alive:
            raise Refused("UNAVAILABLE", f"{name} is not connected: it cannot be told to drain; try again")
        return alive[-1]

    async def scale(self, kind: str, count: int, idempotency_key: str) -> int:
        """See `Control.scale`."""
        return await self.scaling.scale(kind, count, idempotency_key)


async def _open_dataset(spec: RunSpec) -> Dataset:
    return await asyncio.to_thread(Dataset.open, spec.data, spec.seed)


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]
