"""Trials at admission: what only an instance can say of a spec, from scorers and environments that it makes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.table import conflicts
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.domain.devices.fitting import simulators
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import SCORER_AWAY, CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_coordinator.run.simulators.pools import opening, other_kind, refusal_in_users_keys
from headrace_coordinator.run.workers.clients import RewardClient, SimulatorClient

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
                described = await client.open_pool(opening(spec, section.tasks[0], 1), ENVIRONMENT_S)
            await client.close_run()
    except CallRefused as refusal:
        return _refused(refusal_in_users_keys(spec, refusal), "environment", chosen.instance)
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
