"""What a user changes: of a run its intent and its ranks, of the fleet which instances work and how many.

A run's controller follows its intent. What a host can hold its supervisor decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import uuid

from headrace_schema.access import Visibility
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.problems import choose, explain, nearest, problem
from headrace_schema.resources.views import KeyProblemView, RunView
from headrace_schema.rules.learning import model_ranks
from headrace_schema.sections.learning import TrainerSection
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

from headrace_coordinator.api.idempotency import Keys, conflict, digest, of_caller
from headrace_coordinator.api.labels import Labels
from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission.device_rules import size_problems
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.access import TEAM
from headrace_coordinator.domain.devices.scheduling import plan_regroup
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import State
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.quarantine import StillHeld
from headrace_coordinator.fleet.sessions import Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.waits import WaitTimeout

INTENT_SHOWN_S = 2.0
"""How long a write that changes an intent waits for the run to follow it, so that its answer shows that."""
ARCHIVED_S = 10.0
"""How long a deletion waits for a run that has just ended to be written to its files."""
KEY = "trainer.ranks"


class RunChanges:
    """Writes return the run once they are durable."""

    def __init__(self, event_log: EventLog, reads: Reads, keys: Keys, labels: Labels) -> None:
        self._labels = labels
        self._event_log = event_log
        self._reads = reads
        self._keys = keys

    async def pause(self, run_id: str, now: bool, idempotency_key: str) -> RunView:
        """Pauses after the current step, or at once (the step's attempt is aborted)."""
        intent = run_states.PAUSE_NOW if now else run_states.PAUSE
        return await self._intend(run_id, intent, idempotency_key, f"pause now={now}")

    async def resume(self, run_id: str, idempotency_key: str) -> RunView:
        """Goes on with a paused run."""
        return await self._intend(run_id, run_states.RUN, idempotency_key, "resume")

    async def cancel(self, run_id: str, idempotency_key: str) -> RunView:
        """Ends a run; the checkpoints that it has stay."""
        return await self._intend(run_id, run_states.CANCEL, idempotency_key, "cancel")

    async def delete(self, run_id: str, idempotency_key: str) -> None:
        """Deletes an ended run with its checkpoints, export and files, for ever; returns once they are gone.

        Raises Refused: CONFLICT for a run that has not ended, of whose checkpoint another run begins, or where the
        disk refuses, after which the run is not listed any more; UNAVAILABLE while it is still being closed.
        """
        body = digest([run_id, "delete"])
        async with self._keys.held(idempotency_key):
            if self._keys.made(idempotency_key, body):
                return
            if run_id not in self._event_log.state.ended:
                await self._archived(self._reads.find(run_id))
            if users := [run.id for run in self._event_log.state.active_runs() if _begins_with(run, run_id)]:
                others = ", ".join(users)
                what = f"a checkpoint or the export of run {run_id}"
                reason = f"{others} may still read {what}; wait for its end, or cancel it"
                raise Refused("CONFLICT", reason)
            directory = self._event_log.history.directory(run_id).parent
            deleted = ev.RunDeleted(run=run_id)
            await self._event_log.commit(deleted, self._keys.used(idempotency_key, body, run_id))
            self._labels.forget(run_id)
            try:
                await self._event_log.history.remove(run_id)
            except OSError as error:
                reason = (
                    f"run {run_id} is not listed any more, and its files stay: {error}; remove {directory}"
                )
                raise Refused("CONFLICT", reason) from error

    async def _archived(self, run: RunState) -> None:
        """Waits until a run that has ended is archived; raises Refused CONFLICT for one that has not ended."""
        if run.state not in run_states.TERMINAL:
            raise Refused("CONFLICT", f"run {run.id} is {run.state}; headrace run cancel {run.id} first")
        state = self._event_log.state
        try:
            await self._event_log.wait_until(
                lambda: run.id in state.ended and run.id not in state.runs, ARCHIVED_S, "the run's last view"
            )
        except WaitTimeout as late:
            raise Refused("UNAVAILABLE", f"run {run.id} is still being closed ({late}); try again") from late

    async def _intend(self, run_id: str, intent: str, key: str, request: str) -> RunView:
        """Records what the user wants, and the key with it."""
        body = digest([run_id, request])
        if self._keys.made(key, body):
            return self._reads.run(run_id)
        run = self._reads.find(run_id)
        try:
            events = runs.plan_intent(run, intent, "user", f"{intent} asked for")
        except run_states.IllegalIntent as error:
            raise Refused("CONFLICT", str(error)) from error
        await self._event_log.commit(*events, self._keys.used(key, body, run_id))
        with contextlib.suppress(WaitTimeout):
            await self._event_log.wait_until(
                lambda: runs.next_action(run).kind != run_states.MOVE, INTENT_SHOWN_S, "the run to follow"
            )
        return self._reads.run(run_id)

    async def change(self, run_id: str, change: RunChange, idempotency_key: str) -> RunView:
        """Changes a run from its next step on. INVALID or CONFLICT where that does not fit, with what would."""
        body = digest([run_id, change.model_dump(mode="json")])
        async with self._keys.held(idempotency_key):
            if not self._keys.made(idempotency_key, body):
                run, ranks = self._reads.find(run_id), change.trainer.ranks
                fleet = FleetView.of(self._reads.instances())
                events = plan_ranks(self._event_log.state, run, ranks, fleet, self._event_log.now())
                used = self._keys.used(idempotency_key, body, run_id)
                await self._event_log.commit(*events, used)
        return self._reads.run(run_id)

    async def label(self, run_id: str, change: RunLabels, idempotency_key: str) -> RunView:
        """Gives a run, at work or ended, other tags or another note. CONFLICT where the disk refuses."""
        body = digest([run_id, "label", change.model_dump(mode="json")])
        async with self._keys.held(idempotency_key):
            if not self._keys.made(idempotency_key, body):
                self._reads.run(run_id)
                try:
                    await asyncio.to_thread(self._labels.change, run_id, change)
                except OSError as error:
                    reason = f"run {run_id} keeps its labels: {error}; mend that, then ask again"
                    raise Refused("CONFLICT", reason) from error
                await self._event_log.commit(self._keys.used(idempotency_key, body, run_id))
        return self._reads.run(run_id)

    async def share(self, run_id: str, visibility: Visibility, idempotency_key: str) -> RunView:
        """Changes who sees a run, at work or ended: its owner, their team, or everybody."""
        body = digest([run_id, "share", visibility])
        async with self._keys.held(idempotency_key):
            if not self._keys.made(idempotency_key, body):
                run = self._reads.run(run_id)
                if visibility == TEAM and not run.team:
                    reason = f"run {run_id} belongs to no team: its owner's token has none"
                    raise Refused("CONFLICT", f"{reason}; share it with the fleet")
                shared = ev.RunShared(run=run_id, visibility=visibility)
                await self._event_log.commit(shared, self._keys.used(idempotency_key, body, run_id))
        return self._reads.run(run_id)


def _begins_with(run: RunState, origin: str) -> bool:
    """Whether a run that has not ended begins with another's checkpoint or export, or evaluates its checkpoint."""
    forked = run.spec.get("from_checkpoint") or {}
    evaluates = run.evaluation is not None and run.evaluation.checkpoint_run == origin
    return evaluates or origin in (forked.get("run"), *run.follows[-1:])


def plan_ranks(state: State, run: RunState, ranks: int, fleet: FleetView, now: float) -> list[ev.Event]:
    """The event with which a run's trainer group should get `ranks` ranks; nothing when that is wanted already.

    Raises Refused: CONFLICT by the run's state or what others hold, INVALID for what never fits this run.
    """
    if run.state in run_states.TERMINAL or run.intent == run_states.CANCEL:
        raise Refused("CONFLICT", f"run {run.id} is {run.state}; nothing can change it any more")
    if run.evaluation is not None:
        raise _invalid(problem(KEY, "an evaluation trains nothing", "set it on a run that trains"))
    if len(run.sizes) > 1:
        reason = "the run takes and gives back ranks by itself, as its trainer.min_ranks and max_ranks say"
        raise _invalid(problem(KEY, reason, "scale the trainers, or submit a run without them"))
    if ranks == (run.wanted_ranks or run.ranks):
        return []
    if ranks != run.ranks:
        _check_fits(state, run, ranks, fleet, now)
    reason = f"{KEY}: {ranks} is wanted"
    return [ev.RanksWanted(run=run.id, ranks=ranks, author="user", reason=reason)]


def _check_fits(state: State, run: RunState, ranks: int, fleet: FleetView, now: float) -> None:
    spec = _changed(run, ranks)
    if run.grant is None:
        if problems := size_problems(spec, fleet):
            raise _invalid(*problems)
        return
    missing = plan_regroup(state, run.id, ranks, "", now)
    if isinstance(missing, str):
        more = f"; start more with `headrace scale trainer={fleet.instances.get('trainer', 0) + ranks - run.ranks}`"
        raise Refused(
            "CONFLICT", f"{KEY}: {ranks} needs {missing}{more if 'trainer instance' in missing else ''}"
        )


def _changed(run: RunState, ranks: int) -> RunSpec:
    """The spec with this number of ranks; raises Refused INVALID."""
    algorithm = run.spec["algorithm"]
    prompts: int = algorithm["prompts_per_step"]
    if run.spec.get("deterministic"):
        raise _invalid(problem(KEY, "a deterministic run keeps its ranks", "submit a run with other ones"))
    model = model_ranks(TrainerSection.model_validate(run.spec["trainer"]))
    if ranks % model == 0 and prompts % (ranks // model):
        fitting = ", ".join(str(n * model) for n in range(1, prompts + 1) if prompts % n == 0)
        reason = f"{ranks} ranks cannot share the {prompts} groups of a step evenly"
        raise _invalid(problem(KEY, reason, f"use one of: {fitting}"))
    spec = copy.deepcopy(run.spec)
    spec["trainer"]["ranks"] = ranks
    try:
        return RunSpec.model_validate(spec)
    except ValidationError as error:
        raise _invalid(*explain(error, RunSpec)) from error


def _invalid(*problems: KeyProblemView) -> Refused:
    return Refused("INVALID", f"the run cannot have {KEY} changed like this", list(problems))


ANSWER_S = 30.0
"""How long a supervisor may take to check and accept a number; the processes are not waited for."""


class InstanceChanges:
    """Each Idempotency-Key sends one command."""

    def __init__(self, fleet: Fleet, keys: Keys) -> None:
        self._fleet = fleet
        self._keys = keys
        self._in_flight: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By key: what is asked for, and the command to the supervisor."""
        self._answers: dict[str, asyncio.Future[str]] = {}

    async def drain(self, name: str, idempotency_key: str) -> str:
        """Takes an instance out of use in order; its process then ends. Returns its incarnation.

        The key is recorded with the incarnation: a later process of the name is another.

        Raises:
            Refused: NOT_FOUND, naming the nearest instance; UNAVAILABLE for one that is not connected.
        """
        body = digest(["drain", name])
        async with self._keys.held(idempotency_key):
            incarnation = self._keys.made(idempotency_key, body)
            if not incarnation:
                incarnation = self._drainable(name)
                used = self._keys.used(idempotency_key, body, incarnation)
                await self._fleet.drain(incarnation, used)
        return incarnation

    def _drainable(self, name: str) -> str:
        """The incarnation of a connected instance."""
        instances = self._fleet.event_log.state.instances.values()
        known = [i.incarnation for i in instances if i.instance == name]
        if not known:
            close = nearest(name, {i.instance for i in instances})
            message = f"there is no instance {name[:40]!r}" + (f"; did you mean {close}?" if close else "")
            raise Refused("NOT_FOUND", message)
        alive = [incarnation for incarnation in known if self._fleet.alive(incarnation)]
        if not alive:
            raise Refused("UNAVAILABLE", f"{name} is not connected: it cannot be told to drain; try again")
        return alive[-1]

    async def release_device(self, device: str, idempotency_key: str, reason: str = "") -> str:
        """Ends a device's quarantine by a person's word, durably. Returns its full name.

        Raises:
            Refused: NOT_FOUND for what names no device in quarantine, INVALID for what names several, CONFLICT while
                the device's last holder is there.
        """
        body = digest(["release", device, reason])
        async with self._keys.held(idempotency_key):
            name = self._keys.made(idempotency_key, body)
            if not name:
                name = self._quarantined(device)
                used = self._keys.used(idempotency_key, body, name)
                try:
                    await self._fleet.quarantines.release(name, reason, used)
                except StillHeld as held:
                    raise Refused("CONFLICT", self._fleet.readable(str(held))) from held
        return name

    def _quarantined(self, device: str) -> str:
        known = self._fleet.event_log.state.table.quarantined.keys()
        found = sorted(name for name in known if name == device or name.endswith(f"/{device}"))
        if len(found) == 1:
            return found[0]
        fix = choose(device, found or known, extra="`headrace leases` shows every device")
        if found:
            raise Refused("INVALID", f"{device[:60]!r} is the end of several devices' names: {fix}")
        raise Refused("NOT_FOUND", f"no device in quarantine is called {device[:60]!r}: {fix}")

    async def scale(self, kind: str, count: int, key: str, host: str = "") -> int:
        """Returns `count` once the supervisor of a host has accepted it and the key is durable.

        `host` may be left out where one alone can change the number.

        A repeated key gets the answer of its first command, also while that one is in flight.

        Raises:
            Refused: UNAVAILABLE without the supervisor's answer, and without one right after a start; CONFLICT
                without one later, and for a key of another request; INVALID with the supervisor's reason, or for a
                host that there is not.
        """
        body = f"scale {kind}={count}" + (f" on {host}" if host else "")
        if self._keys.made(key, body):
            return count
        mine = of_caller(key)
        used_for, command = self._in_flight.get(mine, (body, None))
        if used_for != body:
            raise conflict(key)
        if command is None:
            command = asyncio.create_task(self._command(kind, count, key, body, host), name=body)
            self._in_flight[mine] = body, command
            command.add_done_callback(lambda _: self._in_flight.pop(mine))
        await asyncio.shield(command)  # another request with this key may wait for the same command
        return count

    async def _command(self, kind: str, count: int, key: str, body: str, host: str) -> None:
        supervisor = self._supervisor_of(kind, host)
        if error := await self._ask(supervisor, kind, count):
            fix = "ask for a number that the host can hold"
            raise Refused("INVALID", error, [problem("count", error, fix)])
        await self._fleet.event_log.commit(self._keys.used(key, body, f"services/{kind}"))

    def _supervisor_of(self, kind: str, host: str) -> Supervisor:
        able = {each.host: each for each in self._fleet.supervisors.values() if kind in each.scalable}
        if not able:
            reason = f"no connected supervisor can change the number of {kind} processes"
            if self._fleet.lease_manager.lenient:  # this coordinator has just started: they may come yet
                raise Refused("UNAVAILABLE", f"{reason}; try again")
            fix = "`headrace up` and `headrace join` can, and a scaler of containers or pods that is started"
            raise Refused("CONFLICT", f"{reason}; {fix}")
        if host in able or (len(able) == 1 and not host):
            return able[host or next(iter(able))]
        hosts = ", ".join(sorted(able))
        reason = (
            f"there is no host {host[:40]!r}; there are {hosts}"
            if host
            else f"several hosts run {kind} processes: say which ({hosts})"
        )
        raise Refused("INVALID", f"host: {reason}", [problem("host", reason, choose(host, able))])

    async def _ask(self, supervisor: Supervisor, kind: str, count: int) -> str:
        """Why the supervisor refuses, or empty."""
        request = uuid.uuid4().hex
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        supervisor.send("scale", (request, kind, count))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError as error:
            waited = (
                f"waited {ANSWER_S:.0f} s for the supervisor of {supervisor.host} to accept {kind}={count}"
            )
            raise Refused("UNAVAILABLE", waited) from error
        finally:
            del self._answers[request]

    def answered(self, request: str, error: str) -> None:
        """A supervisor answered a command; empty `error`: it accepted."""
        answer = self._answers.get(request)
        if answer is not None and not answer.done():
            answer.set_result(error)
