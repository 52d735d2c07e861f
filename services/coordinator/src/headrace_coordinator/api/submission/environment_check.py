"""What only a simulator can tell of a spec: whether the sizes and names that it states are the environment's."""

from __future__ import annotations

from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.trial import on_trial
from headrace_coordinator.domain.devices.fitting import simulators
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_coordinator.run.simulators.pools import in_users_keys, opening
from headrace_coordinator.run.workers.clients import SimulatorClient

TRIAL_S = 60.0
"""Longest time that a submission waits for one environment; what takes longer is found out when the run opens."""
SIZES = ("bounds", "state_size", "cameras", "height", "width")


def states_sizes(spec: RunSpec) -> bool:
    """Whether the spec says something of the environment that the environment may contradict."""
    section, policy = spec.environment, spec.model.policy
    if section is None:
        return False
    named = section.state is not None or section.cameras is not None
    given = any(key in policy for key in SIZES) if policy is not None else read_policy_file(spec.model.path)
    return named or bool(given)


async def try_environment(spec: RunSpec, fleet: Fleet, trials: set[str]) -> list[KeyProblemView]:
    """Makes one environment of the first task at a ready simulator and compares; what does not fit, by key.

    Specs that leave sizes to the environment are not tried: nothing in them can be wrong. A simulator in trouble, or
    one that is slow, is the run's to handle.
    """
    section = spec.environment
    if section is None or not states_sizes(spec):
        return []
    ready = simulators(fleet.ready("simulator"), section.backend)
    if not ready:
        return []
    chosen = ready[0]
    try:
        with on_trial(SimulatorClient, chosen, fleet, trials) as trial:
            described = await trial.open_pool(opening(section, section.tasks[0], 1), TRIAL_S)
            await trial.close_run()
    except (CallRefused, InstanceDown) as trouble:
        return _told(trouble, chosen.instance)
    return _misfits(spec, section, described)


def _misfits(
    spec: RunSpec, section: EnvironmentSection, described: simulator.OpenPoolResponse
) -> list[KeyProblemView]:
    written = None if spec.model.policy is not None else read_policy_file(spec.model.path)
    try:
        fit(spec.model.policy, section, {section.tasks[0]: described}, written)
    except Impossible as impossible:
        return impossible.problems
    return []


def _told(trouble: Exception, instance: str) -> list[KeyProblemView]:
    if not isinstance(trouble, CallRefused) or trouble.reason != "INVALID":
        return []
    refusal = in_users_keys(trouble)
    _, _, text = refusal.message.partition(f"{refusal.key}: ")
    fix = f"mend it: {instance} has tried it, and its log says more"
    return [problem(refusal.key or "environment", text or refusal.message, fix)]
