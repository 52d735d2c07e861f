"""Takes runs and evaluations: resolves a spec once, asks the rules, then instances, and queues the run."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.fleet import InstanceView
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.table import conflicts
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.idempotency import Keys, digest
from headrace_coordinator.api.reading.past import Past
from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission.evaluations import (
    in_users_keys,
    resolve_evaluation,
    suite_evaluation,
)
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.local_rules import fork
from headrace_coordinator.api.submission.rules import LOCAL, OF_FLEET, problems_of
from headrace_coordinator.api.submission.submission import Origin, Submission
from headrace_coordinator.aside import CHECKING
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices.fitting import simulators
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.deaths import RESTART_S
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import SCORER_AWAY, CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_coordinator.run.simulators.pools import opening, other_kind, refusal_in_users_keys
from headrace_coordinator.run.workers.clients import RewardClient, SimulatorClient
from headrace_coordinator.waits import WaitTimeout

ENVIRONMENT_S = 60.0
"""Longest time that a submission waits for one environment; what takes longer is found out when the run opens."""
Client = TypeVar("Client", bound=WorkerClient)


async def check_scorers(spec: RunSpec, fleet: Fleet, trials: set[str]) -> list[KeyProblemView]:
    """Opens the spec's scorers at a ready reward instance and closes them; what it refuses, by key.

    Scorers without a file or options of the user's are known to work. An instance in trouble is the run's to handle.
    """
    scorers = [scorer for found in spec.reward.sets().values() for scorer in found]
    ready = fleet.ready("reward")
    if not ready or not any(".py:" in scorer.name or scorer.options for scorer in scorers):
        return []
    chosen = ready[0]
    try:
        with _before_a_run(RewardClient, chosen, fleet, trials) as client:
            async with fleet.deaths.opening(client.run, chosen):
                await client.open_run(spec.reward)
            await client.close_run()
    except CallRefused as refusal:
        return _refused(refusal, "reward.scorers", chosen.instance)
    except InstanceDown:
        if fleet.alive(chosen.incarnation):
            limit = f"{spec.reward.opening_s:g} s"
            return [
                problem(
                    "reward.load_timeout_s",
                    f"{chosen.instance} has not loaded and tried the scorers within {limit}",
                    "raise it, or make their import quicker",
                )
            ]
    return []


async def check_environment(submission: Submission, fleet: Fleet, trials: set[str]) -> list[KeyProblemView]:
    """Makes one environment of the first task at a ready simulator and compares; what does not fit, by key.

    A simulator that is in trouble or slow is the run's to handle.
    """
    spec = submission.spec
    section = spec.environment
    if section is None:
        return []
    ready = simulators(fleet.ready("simulator"), section.backend)
    if not ready:
        return []
    chosen = ready[0]
    try:
        with _before_a_run(SimulatorClient, chosen, fleet, trials) as client:
            async with fleet.deaths.opening(client.run, chosen):
                described = await client.open_pool(opening(section, section.tasks[0], 1), ENVIRONMENT_S)
            await client.close_run()
    except CallRefused as refusal:
        return _refused(refusal_in_users_keys(refusal), "environment", chosen.instance)
    except InstanceDown:
        return []
    if problems := other_kind(spec, described):
        return problems
    if not spec.speaks_with_environments:
        return _misfits(spec, section, described)
    return [*_unseen(submission)] if described.images else []


def _unseen(submission: Submission) -> Iterator[KeyProblemView]:
    """Problems of a run whose environment shows images."""
    shows = "the environment shows images"
    yield from conflicts(replace(submission.resolved, images=shows))
    if not submission.spec.data.prompt.chat:
        yield problem("data.prompt.chat", f"{shows}, which a chat template places", "set it to true")


def _misfits(
    spec: RunSpec, section: EnvironmentSection, described: simulator.OpenPoolResponse
) -> list[KeyProblemView]:
    written = None if spec.model.policy is not None else read_policy_file(spec.model.path)
    try:
        fit(spec.model.policy, section, {section.tasks[0]: described}, written)
    except Impossible as impossible:
        return impossible.problems
    return []


def _refused(refusal: CallRefused, key: str, instance: str) -> list[KeyProblemView]:
    """What an instance finds wrong with the spec; other refusals are the run's to handle."""
    if refusal.reason not in ("INVALID", SCORER_AWAY):
        return []
    fix = f"{instance} has tried it, and its log says more"
    return [problem(refusal.key or key, refusal.cause, fix)]


@contextmanager
def _before_a_run(
    kind: type[Client], chosen: InstanceState, fleet: Fleet, trials: set[str]
) -> Iterator[Client]:
    """A client of the instance; its name is among `trials` meanwhile, so that the reconciler does not close it."""
    client = kind(
        f"trial-{uuid.uuid4().hex[:6]}",
        chosen,
        fleet.client(chosen.incarnation),
        fleet.event_log.state.epoch,
        open_id=fleet.next_open_id(),
    )
    trials.add(client.run)
    try:
        yield client
    finally:
        trials.discard(client.run)  # The reconciler closes what could not be closed here.


def _waits_for_fleet(submission: Submission) -> bool:
    """Whether only the fleet, as it is now, is in the way."""
    return bool(problems_of(submission, OF_FLEET)) and not problems_of(submission, LOCAL)


NAMES_COMPARED = 200
"""Newest runs that the name of an unknown one is compared with."""


class Submissions:
    """There is one way for a run and for an evaluation, which is a run without trainers."""

    def __init__(
        self,
        fleet: Fleet,
        trials: set[str],
        reads: Reads,
        past: Past,
        keys: Keys,
        data_dir: Path,
        open_dataset: Callable[[RunSpec], Awaitable[Dataset]],
        new_id: Callable[[], str],
    ) -> None:
        """`trials` are names under which instances are asked before there is a run."""
        self._event_log = fleet.event_log
        self._fleet = fleet
        self._trials = trials
        self._reads = reads
        self._past = past
        self._keys = keys
        self._data_dir = data_dir
        self._open_dataset = open_dataset
        self._new_id = new_id

    async def submit(self, asked: RunSpec | EvaluationSpec, idempotency_key: str) -> str:
        """Queues a run and returns its id once that is durable.

        The same key with the same spec returns the same run.

        Raises:
            Refused: INVALID with every problem; CONFLICT for a key of another request.
        """
        trains, request = isinstance(asked, RunSpec), asked.model_dump(mode="json")
        body = digest(request if trains else ["evaluation", request])
        async with self._keys.held(idempotency_key):
            if made := self._keys.made(idempotency_key, body):
                return made
            try:
                submission = await self.check(asked)
            except Impossible as error:
                what = "run this spec" if trains else "make this evaluation"
                raise Refused("INVALID", f"the fleet cannot {what}", error.problems) from error
            return await self._queue(submission, idempotency_key, body)

    async def check(self, asked: RunSpec | EvaluationSpec) -> Submission:
        """What could start on the fleet as it is now; an instance that is just being restarted is waited for.

        Raises:
            Impossible: with every problem, in the keys of what was asked.
        """
        submission = await self._resolve(asked)
        if await CHECKING.run(partial(_waits_for_fleet, submission)):
            submission = await self._once_restarted(submission)
        problems = await CHECKING.run(partial(problems_of, submission))
        problems = problems or await check_scorers(submission.spec, self._fleet, self._trials)
        problems = problems or await check_environment(submission, self._fleet, self._trials)
        problems = problems or await self._changed_origin(submission)
        if problems:
            raise Impossible(in_users_keys(problems, submission.evaluated))
        await CHECKING.run(lambda: (submission.settled, submission.note))  # which are kept
        return submission

    async def _resolve(self, asked: RunSpec | EvaluationSpec) -> Submission:
        named = asked.from_checkpoint if isinstance(asked, RunSpec) else asked.checkpoint
        origin = await self._origin(named.run) if named is not None else None
        spec, evaluated = (asked, None) if isinstance(asked, RunSpec) else resolve_evaluation(asked, origin)
        data: Dataset | Impossible
        try:
            data = await self._open_dataset(spec)
        except Impossible as error:
            data = error
        return Submission(spec, FleetView.of(self._reads.instances()), data, origin, evaluated)

    async def _origin(self, name: str) -> Origin:
        names = self._reads.newest_first()
        if name not in names:
            return Origin(name, None, names[:NAMES_COMPARED])
        live = self._event_log.state.runs.get(name)
        saving = live is not None and live.state not in run_states.TERMINAL and live.last_checkpoint > 0
        return Origin(name, self._reads.run(name), names, await self._past.checkpoints(name), saving)

    async def _once_restarted(self, submission: Submission) -> Submission:
        """The submission on the fleet that it waited for: as long as instances that come may make it possible."""

        def on(instances: Sequence[InstanceView]) -> Submission:
            return replace(submission, fleet=FleetView.of(instances))

        def settled() -> bool:
            here = self._reads.instances()
            possible = self._fleet.starting() or not problems_of(
                on([*here, *self._reads.instances_returning()]), OF_FLEET
            )
            return not possible or not problems_of(on(here), OF_FLEET)

        with contextlib.suppress(WaitTimeout):
            await self._event_log.wait_until(settled, RESTART_S, "instances to be restarted")
        return on(self._reads.instances())

    async def _changed_origin(self, submission: Submission) -> list[KeyProblemView]:
        """The checks may take a minute, in which the origin of a fork goes on and deletes checkpoints."""
        if submission.spec.from_checkpoint is None:
            return []
        origin = await self._origin(submission.spec.from_checkpoint.run)
        return problems_of(replace(submission, origin=origin), (fork,))

    async def _queue(self, submission: Submission, key: str, body: str) -> str:
        spec, now = submission.settled, self._event_log.now()
        run = f"{spec.name}-{self._new_id()}"
        evaluation = suite_evaluation(submission)
        submitted = ev.RunSubmitted(
            at=now,
            run=run,
            spec=spec.model_dump(mode="json"),
            directory=str(self._data_dir / "runs" / run),
            evaluation=None if evaluation is None else msgspec.to_builtins(evaluation),
        )
        notes = [ev.Noted(at=now, run=run, text=submission.note)] if submission.note else []
        await self._event_log.commit(submitted, self._keys.used(key, body, run), *notes)
        return run
