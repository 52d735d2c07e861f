"""Takes runs and evaluations: resolves a spec once, asks table and rules, then makes trials, and queues the run."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.fleet import InstanceView
from headrace_schema.spec import RunSpec
from headrace_schema.stores import is_remote

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.access.quotas import Quotas
from headrace_coordinator.access.trust import Trust, foreign_paths, holding_paths
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
from headrace_coordinator.api.submission.imitating import imitating
from headrace_coordinator.api.submission.local_rules import fork
from headrace_coordinator.api.submission.rules import LOCAL, OF_FLEET, problems_of
from headrace_coordinator.api.submission.stores import check_stores, remote_origin
from headrace_coordinator.api.submission.submission import Origin, Submission
from headrace_coordinator.api.submission.trials import check_environment, check_scorers
from headrace_coordinator.aside import CHECKING
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.access import ADMIN, PRIVATE, TEAM
from headrace_coordinator.domain.pipelines import following
from headrace_coordinator.fleet.deaths import RESTART_S
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.waits import WaitTimeout

NAMES_COMPARED = 200
"""Newest runs that the name of an unknown one is compared with."""


def _lacks_fleet_alone(submission: Submission) -> bool:
    """Whether only the fleet, as it is now, is in the way: a spec that is wrong by itself waits for no instance."""
    return bool(problems_of(submission, OF_FLEET)) and not problems_of(submission, LOCAL)


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
        quotas: Quotas,
        trust: Trust,
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
        self._quotas = quotas
        self._trust = trust

    async def submit(
        self, asked: RunSpec | EvaluationSpec, idempotency_key: str, visibility: str = PRIVATE
    ) -> str:
        """Queues a run of the caller and returns its id once that is durable.

        The same key with the same spec returns the same run.

        Raises:
            Refused: INVALID with every problem; CONFLICT for a key of another request.
        """
        trains, request = isinstance(asked, RunSpec), asked.model_dump(mode="json")
        body = digest([request if trains else ["evaluation", request], visibility])
        async with self._keys.held(idempotency_key):
            if made := self._keys.made(idempotency_key, body):
                return made
            if visibility == TEAM and not CALLER.get().team:
                reason = "your token has no team"
                fix = "use private or fleet, or a token with a team"
                raise Refused("INVALID", reason, [problem("visibility", reason, fix)])
            await self._quotas.admit(CALLER.get(), asked.scheduling.priority)
            try:
                submission = await self.check(asked)
            except Impossible as error:
                what = "run this spec" if trains else "make this evaluation"
                raise Refused("INVALID", f"the fleet cannot {what}", error.problems) from error
            return await self._queue(submission, idempotency_key, body, visibility)

    async def check(self, asked: RunSpec | EvaluationSpec) -> Submission:
        """What could start on the fleet as it is now; an instance that is just being restarted is waited for.

        Raises:
            Impossible: with every problem, in the keys of what was asked.
        """
        given = asked.model_dump(mode="json", exclude_unset=True)
        problems = [*foreign_paths(given, self._data_dir, self._reads.sees)]
        if not CALLER.get().may(ADMIN):
            free = (
                self._data_dir / "models",
                self._data_dir / "runs",
            )  # of runs: what `foreign_paths` lets pass
            problems += [*holding_paths(given, self._data_dir), *self._trust.problems(given, free)]
        if problems := problems or await check_stores(asked):
            raise Impossible(problems)
        submission = await self._resolve(asked)
        if await CHECKING.run(partial(_lacks_fleet_alone, submission)):
            submission = await self._once_restarted(submission)
        problems = await CHECKING.run(partial(problems_of, submission))
        problems = problems or await check_scorers(submission.spec, self._fleet, self._trials)
        problems = problems or await check_environment(submission, self._fleet, self._trials)
        if not problems and submission.spec.from_checkpoint is not None:
            # The trials may take a minute, in which the origin of a fork goes on and deletes checkpoints.
            origin = await self._origin(submission.spec.from_checkpoint.run)
            problems = problems_of(replace(submission, origin=origin), (fork,))
        if problems:
            raise Impossible(
                in_users_keys(problems, submission.evaluated.suite if submission.evaluated else None)
            )
        await CHECKING.run(lambda: (submission.settled, submission.note))  # which are kept
        return submission

    async def _resolve(self, asked: RunSpec | EvaluationSpec) -> Submission:
        follows: list[str] = []
        if isinstance(asked, RunSpec) and asked.after is not None:
            names = [each for each in self._reads.newest_first() if self._reads.sees(each)]
            asked, follows = following(asked, names, self._reads.run)
        named = asked.from_checkpoint if isinstance(asked, RunSpec) else asked.checkpoint
        if isinstance(asked, EvaluationSpec) and named is not None and is_remote(named.run):
            fix = "export the checkpoint, and give the model's path in place of checkpoint"
            raise Impossible([problem("checkpoint.run", "an evaluation reads no checkpoint of a store", fix)])
        origin = await self._origin(named.run) if named is not None else None
        spec, evaluated = (asked, None) if isinstance(asked, RunSpec) else resolve_evaluation(asked, origin)
        data: Dataset | Impossible
        try:
            data = await self._open_dataset(spec)
            spec = await imitating(spec)
        except Impossible as error:
            data = error
        return Submission(spec, FleetView.of(self._reads.instances()), data, origin, evaluated, follows)

    async def _origin(self, name: str) -> Origin:
        if is_remote(name):
            return await remote_origin(name, "from_checkpoint.run")
        names = [each for each in self._reads.newest_first() if self._reads.sees(each)]
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

    async def _queue(self, submission: Submission, key: str, body: str, visibility: str) -> str:
        caller = CALLER.get()
        spec, now = submission.settled, self._event_log.now()
        run = f"{spec.name}-{self._new_id()}"
        evaluation = suite_evaluation(submission) if submission.evaluated else None
        submitted = ev.RunSubmitted(
            at=now,
            run=run,
            spec=spec.model_dump(mode="json"),
            directory=str(self._data_dir / "runs" / run),
            evaluation=None if evaluation is None else msgspec.to_builtins(evaluation),
            follows=submission.follows,
            owner=caller.name,
            team=caller.team,
            visibility=visibility,
        )
        await self._quotas.admit(
            caller, spec.scheduling.priority
        )  # others may have come while it was checked
        notes = [ev.Noted(at=now, run=run, text=submission.note, plain=True)] if submission.note else []
        await self._event_log.commit(submitted, self._keys.used(key, body, run), *notes)
        return run
