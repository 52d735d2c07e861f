"""A fleet's state and the runs submitted to it, without processes: what the tests of admission share."""

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.state import InstanceState, State
from headrace_simulation.specs import random_spec

CORES = 4


def instance(kind, number, host="a", cores=CORES, **fields):
    devices = [] if kind == "reward" else [f"{host}/cpu:{i}" for i in range(cores)]
    name = f"{kind}-{number}"
    return InstanceState(name, f"{name}#1", kind, host, f"{host}:1", devices, {}, **fields)


def fleet(rollouts=1, trainers=1, rewards=1, **fields):
    state = State()
    for kind, count in (("rollout", rollouts), ("trainer", trainers), ("reward", rewards)):
        for number in range(count):
            member = instance(kind, number, **fields)
            state.instances[member.incarnation] = member
    return state


def spec(rollouts=1, trainers=1, mode="collocated", named=((), ()), helpers=0, **scheduling):
    import random

    made = random_spec(random.Random(0), 0).model_dump(mode="json")
    made["rollout"]["instances"], made["trainer"]["ranks"] = rollouts, trainers
    made["trainer"]["helpers"] = helpers
    made["placement"] = {"mode": mode, "rollout": list(named[0]), "trainer": list(named[1])}
    made["scheduling"] = {"priority": 0, "weight": 1.0, "quantum_s": 60.0, **scheduling}
    return made


def submit(state, run, at=0.0, **fields):
    state.apply(ev.RunSubmitted(at=at, run=run, spec=spec(**fields), directory=f"/{run}"))
    return state.runs[run]


def admit_all(state, now):
    """Appends grants one at a time, as the scheduler does; the last plan."""
    while (plan := plan_admission(state, now)).grants:
        grant = plan.grants[0]
        state.apply(grant)
        if state.runs[grant.run].state == "QUEUED":
            state.apply(ev.RunStateChanged(at=now, run=grant.run, state="PLANNING", reason=""))
            state.apply(ev.RunStateChanged(at=now, run=grant.run, state="RUNNING", reason=""))
    return plan
