"""A state of instances on hosts and the devices that they see."""

from headrace_coordinator.domain.state import InstanceState, State


def instance(name, host, devices, kind="rollout"):
    return InstanceState(name, name, kind, host, "", list(devices), {})


def state_of(instances, *runs):
    state = State()
    state.instances = {i.incarnation: i for i in (*instances, instance("reward-0", "r", [], "reward"))}
    for run in runs:
        state.apply(run)
    return state
