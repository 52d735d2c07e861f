"""One machine seen by several containers: its devices are leased once, whoever sees them."""

from types import SimpleNamespace

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import Blocked, LeaseRequest, plan_grant
from headrace_coordinator.domain.devices.places import machines, named_devices
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.runs import Grant
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings, Supervisor
from headrace_coordinator.fleet.worker_client import WorkerClient
from headrace_coordinator.run.devices.assignment import PlacementError, assign_devices, default_devices
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_schema.sections.running import PlacementSection
from headrace_schema.spec import RunSpec
from places_parts import instance, state_of

GPU = "GPU-8f2a/gpu:0"
CORES = ["b007/cpu:0", "b007/cpu:1"]


def submitted(name, **placement):
    spec = RunSpec.model_validate(
        {
            "name": name,
            "model": {"path": "owner/model"},
            "data": {"source": "copy_digits", "heldout": 10},
            "reward": {"scorers": [{"name": "exact"}]},
            "placement": placement,
        }
    )
    return ev.RunSubmitted(at=0, run=name, spec=spec.model_dump(mode="json"), directory="d")


def containers(devices):
    """A rollout and a trainer, each in a container of its own on one machine, twice."""
    return [
        instance(f"{kind}-{number}", f"{kind}-container-{number}", devices, kind)
        for number in (0, 1)
        for kind in ("rollout", "trainer")
    ]


def test_hosts_that_share_a_device_are_one_machine_at_any_remove():
    found = machines(
        [
            instance("a", "h1", ["x/cpu:0"]),
            instance("b", "h3", ["x/cpu:1"]),
            instance("c", "h2", ["x/cpu:0", "x/cpu:1"]),
            instance("d", "h4", ["y/cpu:0"]),
            instance("e", "h4", []),
        ]
    )
    assert found == {"a": "h1", "b": "h1", "c": "h1", "d": "h4", "e": "h4"}


def test_two_containers_that_see_one_gpu_compete_for_one_lease():
    state = state_of(containers([GPU]))
    first, second = (
        LeaseRequest("rollout-0", "r", "generate", (GPU,)),
        LeaseRequest("trainer-1", "s", "learn", (GPU,)),
    )
    state.table.apply(plan_grant(state.table, [first], 0.0)[0])
    with pytest.raises(Blocked, match="GPU-8f2a/gpu:0 is held by rollout-0 for r generate"):
        plan_grant(state.table, [second], 0.0)


def test_two_runs_in_containers_of_one_machine_are_not_admitted_to_one_gpu():
    plan = plan_admission(state_of(containers([GPU]), submitted("a"), submitted("b")), 1.0)
    assert [(grant.run, grant.devices) for grant in plan.grants] == [("a", [GPU])]
    assert plan.waiting["b"].startswith("1 device on rollout-container-0 (0 free of 1")


def test_a_disaggregated_run_in_two_containers_needs_two_devices_of_their_machine():
    one = plan_admission(state_of(containers([GPU]), submitted("a", mode="disaggregated")), 1.0)
    assert not one.grants and "2 devices" in one.waiting["a"]
    two = plan_admission(state_of(containers(CORES), submitted("a", mode="disaggregated")), 1.0)
    assert two.grants[0].devices == CORES


def test_short_names_choose_devices_of_any_machine():
    plan = plan_admission(
        state_of(containers(CORES), submitted("a", rollout=["cpu:1"], trainer=["cpu:1"])), 1.0
    )
    assert plan.grants[0].devices == [CORES[1]]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["cpu:1"], [CORES[1]]),
        (["1"], [CORES[1]]),
        (["all"], CORES),
        (["here/all"], CORES),
        (["here/0"], [CORES[0]]),
        (["b007/cpu:0"], [CORES[0]]),
        (["elsewhere/all"], []),
        (["2", "cp"], []),
    ],
)
def test_devices_are_named_by_number_host_or_all(names, found):
    assert named_devices(names, CORES, {core: {"here"} for core in CORES}) == found


def member(state):
    return SimpleNamespace(instance=state, incarnation=state.incarnation)


def seated(state):
    return WorkerClient("a", state, None, 1)


def workers_of(spec, grant, rollouts, trainers):
    return SimpleNamespace(
        spec=spec, section=spec.placement, grant=grant, rollouts=rollouts, trainers=trainers, ranks=1
    )


def test_containers_of_one_machine_divide_its_devices():
    rollout, trainer = (member(i) for i in containers(CORES)[:2])
    section = PlacementSection(mode="disaggregated")
    chosen = default_devices(section, CORES, [rollout], [trainer])
    assert chosen == {
        ("rollout", "rollout-container-0"): CORES[:1],
        ("trainer", "rollout-container-0"): CORES[1:],
    }
    named = PlacementSection(mode="disaggregated", rollout=["cpu:1"], trainer=["cpu:0"])
    assert list(default_devices(named, CORES, [rollout], [trainer]).values()) == [CORES[1:], CORES[:1]]
    with pytest.raises(PlacementError, match="two devices on rollout-container-0"):
        default_devices(section, [GPU], [member(containers([GPU])[0])], [member(containers([GPU])[1])])


def test_hybrid_gives_the_trainer_all_devices_once_answers_are_complete():
    rollout, trainer = (member(i) for i in containers(CORES)[:2])
    section = PlacementSection(mode="hybrid", rollout="0", trainer="1")
    apart, joined = (
        default_devices(section, CORES, [rollout], [trainer], joined=joined) for joined in (False, True)
    )
    assert list(apart.values()) == [CORES[:1], CORES[1:]]
    assert [sorted(side) for side in joined.values()] == [CORES[:1], CORES]
    gpus = [f"GPU-{number}/gpu:{number}" for number in range(2)]
    members = [member(i) for i in containers(gpus)[:2]]
    with pytest.raises(PlacementError, match="on GPUs a rank computes on one"):
        default_devices(PlacementSection(mode="hybrid"), gpus, members[:1], members[1:])


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_members_in_containers_of_one_machine_are_seated_under_one_name(mode):
    """The name is that of the first host; trainers alone would take another one."""
    spec = RunSpec.model_validate({**submitted("a", mode=mode).spec, "rollout": {"instances": 2}})
    rollouts, trainers = (
        [seated(i) for i in containers([*CORES, GPU]) if i.kind == kind] for kind in ("rollout", "trainer")
    )
    grant = Grant([m.incarnation for m in rollouts], [trainers[0].incarnation], [*CORES, GPU])
    workers = workers_of(spec, grant, rollouts, trainers[:1])
    assign_devices(workers, set(), joined=False)
    taken = [device for member in rollouts for device in member.devices]
    assert all(member.devices for member in (*rollouts, trainers[0])) and len(set(taken)) == len(taken)
    shared = set(taken) & set(trainers[0].devices)
    assert bool(shared) is (mode == "collocated")


GPUS = [f"GPU-{number}/gpu:0" for number in range(4)]


@pytest.mark.parametrize(("mode", "count"), [("collocated", 1), ("disaggregated", 2)])
def test_a_run_is_granted_no_gpu_that_it_would_not_use(mode, count):
    members = [instance(f"{kind}-0", "h1", GPUS, kind) for kind in ("rollout", "trainer")]
    grant = plan_admission(state_of(members, submitted("a", mode=mode)), 1.0).grants[0]
    assert len(grant.devices) == count


def test_an_engine_and_a_rank_hold_one_gpu_each():
    """Collocated, one rank takes turns with two engines on two GPUs: it computes on one and holds that one."""
    spec = RunSpec.model_validate({**submitted("a", mode="collocated").spec, "rollout": {"instances": 2}})
    rollouts = [seated(instance(f"rollout-{number}", "h1", GPUS)) for number in range(2)]
    trainers = [seated(instance("trainer-0", "h1", GPUS, "trainer"))]
    grant = Grant([m.incarnation for m in rollouts], ["trainer-0"], GPUS[:2])
    workers = workers_of(spec, grant, rollouts, trainers)
    assign_devices(workers, set(), joined=False)
    assert [member.devices for member in (*rollouts, *trainers)] == [(GPUS[0],), (GPUS[1],), (GPUS[0],)]


def test_a_device_that_only_one_side_sees_is_its_own():
    rollout = member(instance("rollout-0", "h1", [CORES[0]]))
    trainer = member(instance("trainer-0", "h2", CORES, "trainer"))
    rollout_first = default_devices(PlacementSection(mode="disaggregated"), CORES[::-1], [rollout], [trainer])
    assert list(rollout_first.values()) == [[CORES[0]], [CORES[1]]]


async def test_a_supervisor_proves_the_end_of_its_own_host_s_holder_of_a_shared_device():
    event_log = EventLog(MemoryStore(), lambda: 0.0)
    await event_log.open("test", None)
    fleet = Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())
    ours, other = (
        LeaseRequest(who, "r", "learn", (device,), who) for who, device in zip("ab", CORES, strict=True)
    )
    event_log.post(*plan_grant(event_log.state.table, [ours, other], 0.0))
    event_log.post(
        ev.LeaseEnded(at=0, epoch=event_log.state.table.holder_of(CORES[0]).epoch, cause="x", proven=False)
    )
    fleet.supervised(Supervisor("a", lambda command, body: None))
    assert not event_log.state.table.quarantined and event_log.state.table.holder_of(CORES[1])
    fleet.supervised(Supervisor("b", lambda command, body: None))
    assert not event_log.state.table.leases


async def test_people_read_the_host_of_a_device():
    event_log = EventLog(MemoryStore(), lambda: 0.0)
    await event_log.open("test", None)
    fleet = Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())
    event_log.state.instances = {
        i.incarnation: i for i in (instance("a", "h1", CORES), instance("b", "h2", [GPU]))
    }
    assert fleet.readable(f"waits for {CORES[0]} and {GPU}") == "waits for h1/cpu:0 and h2/gpu:0"
