"""What a session run offers to whoever speaks for its loop: HTTP, gRPC, and the protocols of others' clients.

Calls and results are `headrace_schema.sessions`. Every method that refuses raises `api.refusal.Refused`, whose reason
is INVALID (key and fix in `problems`), NOT_FOUND, CONFLICT or UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace_schema.model_size import text_config
from headrace_schema.problems import explain, problem
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sessions import (
    CheckpointView,
    Failure,
    Load,
    Operation,
    Pending,
    Result,
    Sample,
    SessionView,
)
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import SESSION
from pydantic import ValidationError

from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission.submissions import Submissions
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.run.asked.calls import IDLE
from headrace_coordinator.sessions.desk import MOST_WAITING, Desk
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.waits import WaitTimeout

CALL, SAMPLE = "call", "sample"
FAR_AHEAD = 10_000
"""How far a call's number may be above the lowest that is not used."""


class SessionService:
    """All session runs of the coordinator, over the event log, and the desks between callers and runs."""

    def __init__(self, event_log: EventLog, fleet: Fleet, reads: Reads, submissions: Submissions) -> None:
        self._event_log, self._fleet, self._reads, self._submissions = event_log, fleet, reads, submissions

    async def create(self, spec: Mapping[str, Any], idempotency_key: str = "") -> str:
        """Submits a run of `spec`, whose `workflow` is session; returns its id, at once: it may wait in the queue.

        The same key gives the same session. `from_checkpoint: {run: SESSION, checkpoint: NAME}` begins from weights
        and optimizer state that were saved by name.
        """
        try:
            asked = RunSpec.model_validate({"workflow": SESSION, **spec})
        except ValidationError as error:
            raise Refused("INVALID", "the session's spec is wrong", explain(error, RunSpec)) from error
        if not asked.is_session:
            fix = problem("workflow", f"{asked.kind} runs make their steps by themselves", f"set {SESSION}")
            raise Refused("INVALID", "this is no session", [fix])
        return await self._submissions.submit(asked, idempotency_key)

    def info(self, session: str) -> SessionView:
        """The session as it stands."""
        view, desk = self._view(session), self._desk(session)
        spec = view.spec
        head = self._event_log.state.runs.get(session)
        lora = spec["trainer"].get("lora") or {}
        model = ModelSection.model_validate(spec["model"])
        context = model.max_context or text_config(model).get("max_position_embeddings") or 0
        return SessionView(
            session=session,
            state=view.state,
            reason=view.reason,
            model=spec["model"]["path"],
            lora_rank=lora.get("rank", 0),
            max_tokens=context,
            step=view.step,
            version=head.lineage.head if head is not None else 0,
            published=desk.published,
            next_seq=desk.next_seq,
        )

    async def submit(self, session: str, seq: int, operation: Operation) -> str:
        """Accepts call number `seq`, durably, and returns its future.

        Numbers count from 1 over all operations of a session. They are executed in their order, whichever comes first,
        and one waits for those below it. A number that was used returns the future that it has, whatever comes with
        it, and so does one whose call was refused by its result. A call resumes a session that was paused as idle.
        """
        run, desk = self._open(session), self._desk(session)
        if not 1 <= seq < desk.next_seq + FAR_AHEAD:
            fix = f"calls count from 1; the next one is {desk.next_seq}"
            raise Refused(
                "INVALID", f"seq: {seq} is no number of a call; {fix}", [problem("seq", f"{seq}", fix)]
            )
        if seq not in desk.journal.kinds:
            if isinstance(operation, Load):
                self._check_seen(session, operation.checkpoint, "checkpoint")
            if desk.journal.closed:
                raise Refused("CONFLICT", f"session {session} was closed; open another one")
        await desk.keep(seq, operation)
        await self._resume(run)
        return f"{session}:{CALL}:{seq}"

    async def sample(self, session: str, request: Sample, key: str = "") -> str:
        """Accepts a request for samples and returns its future; the same `key` returns the same one.

        It is bound to weights now: `latest` means the version that was published when this returns.
        """
        run, desk = self._open(session), self._desk(session)
        self._check_seen(session, request.weights, "weights")
        if len(desk.waiting) + desk.at_work >= MOST_WAITING:
            raise Refused(
                "UNAVAILABLE", f"{MOST_WAITING:,} requests for samples wait already; ask again later"
            )
        if desk.journal.closed:
            raise Refused("CONFLICT", f"session {session} was closed; open another one")
        made = desk.ask(key, request)
        await self._resume(run)
        return f"{session}:{SAMPLE}:{made}"

    async def result(self, future: str, timeout_s: float) -> Result:
        """The result of a future, or Pending after `timeout_s`. Raises Refused NOT_FOUND for one that is not known.

        A result is kept for as long as the session can be asked for, across restarts of the coordinator; samples
        until the coordinator ends.
        """
        session, _, rest = future.partition(":")
        kind, _, name = rest.partition(":")
        if kind not in (CALL, SAMPLE) or (kind == CALL and not name.isdigit()):
            raise Refused("NOT_FOUND", f"there is no future {future!r}: use one that a call returned")
        self._view(session)
        desk = self._desk(session)

        def there() -> bool:
            if kind == SAMPLE:
                asked = desk.sample(name)
                return asked is None or asked.result is not None
            return int(name) in desk.journal.outcomes or int(name) not in desk.journal.kinds

        def settled() -> bool:
            run = self._event_log.state.runs.get(session)
            return there() or run is None or run.state in run_states.TERMINAL

        run = self._event_log.state.runs.get(session)
        if run is not None and not there():
            await self._resume(run)
        with suppress(WaitTimeout):
            await self._event_log.wait_until(settled, max(0.0, timeout_s), "a result")
        if not settled():
            return Pending(waits_for=self._waits_for(session, kind, name))
        if kind == SAMPLE:
            if (asked := desk.sample(name)) is None:
                raise Refused("NOT_FOUND", f"there are no samples {name!r} any more: ask for them again")
            if asked.result is not None:
                return asked.result
        elif int(name) in desk.journal.outcomes:
            found = await asyncio.to_thread(desk.journal.result, int(name))
            assert found is not None
            return found
        elif int(name) not in desk.journal.kinds:
            raise Refused("NOT_FOUND", f"session {session} has no call {name}: send it first")
        view = self._view(session)
        return Failure(category="server", message=f"session {session} is {view.state}: {view.reason}")

    def checkpoints(self, session: str) -> list[CheckpointView]:
        """What was saved by name, oldest first; also of a session that has ended."""
        self._view(session)
        named = self._desk(session).journal.named
        found = [
            CheckpointView(
                name=name,
                checkpoint=f"{session}/{name}",
                **{key: value for key, value in each.items() if key != "checkpoint"},
            )
            for name, each in named.items()
        ]
        return sorted(found, key=lambda each: each.created)

    async def delete_checkpoint(self, session: str, name: str) -> None:
        """Deletes a checkpoint, for ever."""
        self._view(session)
        journal = self._desk(session).journal
        if name not in journal.named:
            raise Refused("NOT_FOUND", f"session {session} has no checkpoint {name!r}")
        await asyncio.to_thread(journal.name, name, None)

    async def close(self, session: str) -> None:
        """Ends the session: what was accepted is executed, the last weights are saved, and the run succeeds."""
        self._view(session)
        run, desk = self._event_log.state.runs.get(session), self._desk(session)
        if run is None or run.state in run_states.TERMINAL:
            return
        await asyncio.to_thread(desk.journal.close)
        desk.wake()
        await self._resume(run)

    def listed(self) -> list[str]:
        """All sessions that have not been deleted, oldest first."""
        return [name for name in reversed(self._reads.newest_first()) if self._is_session(name)]

    # --- parts

    def _check_seen(self, session: str, checkpoint: str, key: str) -> None:
        """Raises Refused INVALID for a checkpoint, SESSION/NAME, of a session that its caller may not see."""
        other = checkpoint.rpartition("/")[0]
        if other not in ("", session) and not self._reads.sees(other):
            reason, fix = f"there is no session {other[:80]!r}", "name one that you see: GET /v1/sessions"
            raise Refused("INVALID", f"{key}: {reason}; {fix}", [problem(key, reason, fix)])

    def _is_session(self, name: str) -> bool:
        run = self._event_log.state.runs.get(name)
        spec = run.spec if run is not None else self._reads.run(name).spec
        return bool(spec.get("workflow") == SESSION)

    def _view(self, session: str) -> Any:
        view = self._reads.run(session)
        if view.spec.get("workflow") != SESSION:
            raise Refused("NOT_FOUND", f"run {session} is no session: it makes its steps by itself")
        return view

    def _desk(self, session: str) -> Desk:
        directory = self._event_log.history.directory(session).parent
        return self._fleet.desks.of(session, str(directory))

    def _open(self, session: str) -> RunState:
        """A session that has not ended."""
        view = self._view(session)
        run = self._event_log.state.runs.get(session)
        if run is None or run.state in run_states.TERMINAL or run.intent == run_states.CANCEL:
            raise Refused("CONFLICT", f"session {session} is {view.state} ({view.reason}); open another one")
        return run

    async def _resume(self, run: RunState) -> None:
        """A session that has paused because nobody called goes on; one that its user paused does not."""
        if run.intent == run_states.PAUSE and run.state == run_states.PAUSED and run.reason.startswith(IDLE):
            await self._event_log.commit(*runs.plan_intent(run, run_states.RUN, "system", "called"))

    def _waits_for(self, session: str, kind: str, name: str) -> Any:
        run = self._event_log.state.runs[session]
        if kind == CALL and int(name) > self._desk(session).journal.end:
            return "predecessor"
        if run.state == run_states.QUEUED:
            return "queue"
        if run.state == run_states.PAUSED:
            return "paused"
        return "active"
