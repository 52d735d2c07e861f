"""One machine seen by several containers: its devices are leased once, whoever sees them."""

from types import SimpleNamespace

import msgspec
import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import Blocked, LeaseRequest, Quarantine, is_gpu, plan_grant
from headrace_coordinator.domain.devices.placement import placement_of
from headrace_coordinator.domain.devices.places import engine_groups, machines, named_devices
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.runs import Grant
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import WorkerClient
from headrace_coordinator.fleet.sessions import FleetSettings, Supervisor
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
    state.table.apply(plan_grant(state.table, [first])[0])
    with pytest.raises(Blocked, match="GPU-8f2a/gpu:0 is held by rollout-0 for r generate"):
        plan_grant(state.table, [second])


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


def placed(section, devices=()):
    return placement_of(section, gpus=any(map(is_gpu, devices)))


def workers_of(spec, grant, rollouts, trainers):
    return SimpleNamespace(
        spec=spec,
        placement=placed(spec.placement, grant.devices),
        grant=grant,
        rollouts=rollouts,
        trainers=trainers,
        ranks=1,
    )


def test_containers_of_one_machine_divide_its_devices():
    rollout, trainer = (member(i) for i in containers(CORES)[:2])
    section = placed(PlacementSection(mode="disaggregated"))
    chosen = default_devices(section, CORES, [rollout], [trainer])
    assert chosen == {
        ("rollout", "rollout-container-0"): CORES[:1],
        ("trainer", "rollout-container-0"): CORES[1:],
    }
    named = placed(PlacementSection(mode="disaggregated", rollout=["cpu:1"], trainer=["cpu:0"]))
    assert list(default_devices(named, CORES, [rollout], [trainer]).values()) == [CORES[1:], CORES[:1]]
    with pytest.raises(PlacementError, match="two devices on rollout-container-0"):
        default_devices(section, [GPU], [member(containers([GPU])[0])], [member(containers([GPU])[1])])


def test_hybrid_gives_the_trainer_all_devices_once_answers_are_complete():
    rollout, trainer = (member(i) for i in containers(CORES)[:2])
    section = placed(PlacementSection(mode="hybrid", rollout="0", trainer="1"))
    apart, joined = (
        default_devices(section, CORES, [rollout], [trainer], joined=joined) for joined in (False, True)
    )
    assert list(apart.values()) == [CORES[:1], CORES[1:]]
    assert [sorted(side) for side in joined.values()] == [CORES[:1], CORES]
    alone = default_devices(section, CORES, [], [trainer], joined=True)
    assert sorted(*(side for side in alone.values() if side)) == CORES, "also where no rollout is"


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


def spanning(each, *, instances=1, ranks=1, **placement):
    """A run whose engines span `each` GPUs."""
    made = submitted("a", **placement).spec
    made["rollout"] |= {"engine": "vllm", "instances": instances}
    made["rollout"]["engine_options"] = {"tensor_parallel_size": each}
    made["trainer"]["ranks"] = ranks
    return ev.RunSubmitted(at=0, run="a", spec=made, directory="d")


def gpus_of(host, count):
    return [f"GPU-{host}{number}/gpu:{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("mode", "ranks", "count"),
    [("collocated", 1, 4), ("collocated", 4, 4), ("disaggregated", 1, 5), ("disaggregated", 4, 8)],
)
def test_engines_are_granted_and_seated_on_the_gpus_that_they_span(mode, ranks, count):
    gpus = gpus_of("a", 8)
    rollouts = [instance(f"rollout-{number}", "h1", gpus) for number in range(2)]
    trainers = [instance(f"trainer-{number}", "h1", gpus, "trainer") for number in range(ranks)]
    event = spanning(2, instances=2, ranks=ranks, mode=mode)
    grant = plan_admission(state_of([*rollouts, *trainers], event), 1.0).grants[0]
    assert grant.devices == gpus[:count]
    decode, learn = [seated(i) for i in rollouts], [seated(i) for i in trainers]
    spec = RunSpec.model_validate(event.spec)
    workers = workers_of(spec, Grant(grant.rollouts, grant.trainers, grant.devices), decode, learn)
    workers.ranks = ranks
    assign_devices(workers, set(), joined=False)
    assert [worker.devices for worker in decode] == [(gpus[0], gpus[1]), (gpus[2], gpus[3])]
    assert {len(worker.devices) for worker in learn} == {1}
    own = [device for worker in learn for device in worker.devices]
    assert own == gpus[:ranks] if mode == "collocated" else own == gpus[4 : 4 + ranks]


def test_engines_over_hosts_take_an_instance_of_each_and_keep_what_lives():
    members = [instance(f"r{number}", host, []) for number, host in enumerate(("h1", "h1", "h2", "h2", "h3"))]

    def found(there, known=()):
        return [[each.incarnation for each in group] for group in engine_groups(there, 2, known)]

    pairs = [["r0", "r2"], ["r1", "r3"]]
    assert found(members) == pairs and found(members[:2]) == []
    without = [members[1], members[3], members[4], members[2]]
    assert found(without, pairs) == [["r1", "r3"], ["r4", "r2"]]
    assert found(without[2:], [["r4"]]) == [["r4", "r2"]], "one whose other half is lost is no engine"


def test_an_engine_over_hosts_is_granted_an_equal_part_of_each_and_waits_for_another_host():
    first, second = gpus_of("a", 4), gpus_of("b", 4)
    event = spanning(8, instances=2, mode="collocated")
    event.spec["rollout"]["engine_options"]["hosts"] = 2
    trainer = instance("trainer-0", "h1", first, "trainer")
    both = [instance("rollout-0", "h1", first), instance("rollout-1", "h2", second), trainer]
    grant = plan_admission(state_of(both, event), 1.0).grants[0]
    assert grant.rollouts == ["rollout-0", "rollout-1"] and grant.devices == [*first, *second]
    one = [instance(f"rollout-{number}", "h1", first) for number in range(2)]
    waits = plan_admission(state_of([*one, trainer], event), 1.0).waiting["a"]
    assert waits == "2 rollout instances (0 free), 2 of them on different hosts for each engine"


def test_engines_spread_over_hosts_as_their_gpus_allow():
    """By name all four of the first host would come first, and its four GPUs hold two engines of two."""
    first, second = gpus_of("a", 4), gpus_of("b", 4)
    rollouts = [instance(f"rollout-{number}", "h1", first) for number in range(4)]
    rollouts += [instance(f"rollout-{number}", "h2", second) for number in range(4, 8)]
    trainers = [instance("trainer-0", "h1", first, "trainer")]
    event = spanning(2, instances=4, mode="collocated")
    plan = plan_admission(state_of([*rollouts, *trainers], event), 1.0)
    assert plan.grants[0].rollouts == ["rollout-0", "rollout-1", "rollout-4", "rollout-5"]
    assert plan.grants[0].devices == [*first, *second]


def test_ranks_beside_engines_go_where_gpus_are_left():
    first, second = gpus_of("a", 4), gpus_of("b", 4)
    members = [instance("rollout-0", "h1", first)]
    members += [
        instance(f"trainer-{n}", f"h{1 + n // 2}", (first, second)[n // 2], "trainer") for n in range(4)
    ]
    plan = plan_admission(state_of(members, spanning(4, ranks=2, mode="disaggregated")), 1.0)
    assert plan.grants[0].trainers == ["trainer-2", "trainer-3"]
    assert plan.grants[0].devices == [*first, *second[:2]]


def test_an_engine_waits_for_all_the_gpus_that_it_spans():
    gpus = gpus_of("a", 4)
    members = [instance(f"{kind}-0", "h1", gpus, kind) for kind in ("rollout", "trainer")]
    state = state_of(members, spanning(4, mode="collocated"))
    state.table.quarantined[gpus[2]] = Quarantine("old", "in doubt")
    plan = plan_admission(state, 1.0)
    assert not plan.grants and plan.waiting["a"].startswith("4 devices on h1 (3 free of 3")


def test_an_engine_is_not_seated_on_gpus_that_its_instance_does_not_see():
    gpus = gpus_of("a", 4)
    rollouts = [instance("rollout-0", "h1", gpus[3:]), instance("rollout-1", "h1", gpus[:3])]
    trainers = [instance("trainer-0", "h1", gpus, "trainer")]
    spec = RunSpec.model_validate(spanning(2, instances=2, mode="collocated").spec)
    workers = workers_of(
        spec,
        Grant(["rollout-0", "rollout-1"], ["trainer-0"], gpus),
        [seated(i) for i in rollouts],
        [seated(i) for i in trainers],
    )
    with pytest.raises(
        PlacementError, match=r"instance of 2 GPUs .* is wanted and rollout-0 sees 1 of those"
    ):
        assign_devices(workers, set(), joined=False)
    workers.grant.devices = gpus[1:]
    with pytest.raises(PlacementError, match=r"2 instances of 2 devices each .* need 4 and there are 3"):
        assign_devices(workers, set(), joined=False)


def test_a_replaced_engine_takes_the_gpus_that_the_others_leave():
    gpus = gpus_of("a", 6)
    rollouts = [seated(instance(f"rollout-{number}", "h1", gpus)) for number in range(3)]
    trainers = [seated(instance("trainer-0", "h1", gpus, "trainer"))]
    spec = RunSpec.model_validate(spanning(2, instances=3, mode="collocated").spec)
    grant = Grant([w.incarnation for w in rollouts], ["trainer-0"], gpus)
    workers = workers_of(spec, grant, rollouts, trainers)
    rollouts[2].devices, rollouts[2].lease_epoch = (gpus[0], gpus[1]), 7
    assign_devices(workers, set(), joined=False)
    assert [w.devices for w in rollouts] == [(gpus[2], gpus[3]), (gpus[4], gpus[5]), (gpus[0], gpus[1])]


def test_on_cpu_slots_an_engine_has_its_part_whatever_its_size():
    members = [instance(f"{kind}-0", "h1", CORES, kind) for kind in ("rollout", "trainer")]
    grant = plan_admission(state_of(members, spanning(4, mode="disaggregated")), 1.0).grants[0]
    assert grant.devices == CORES


def apart(each, **placement):
    """A run in whose conversations a frozen model plays a role on devices of its own."""
    event = spanning(each, **placement)
    replier = {"path": "m", "own_devices": True}
    environment = {"tasks": ["exchange"], "backend": "conversation", "roles": {"replier": replier}}
    return msgspec.structs.replace(
        event, spec=event.spec | {"workflow": "agentic", "environment": environment}
    )


@pytest.mark.parametrize(("mode", "count"), [("collocated", 4), ("disaggregated", 5)])
def test_a_model_with_gpus_of_its_own_has_as_many_as_the_policys_engine(mode, count):
    gpus, event = gpus_of("a", 8), apart(2, mode=mode)
    members = [instance(f"{kind}-0", "h1", gpus, kind) for kind in ("rollout", "trainer", "simulator")]
    grant = plan_admission(state_of(members, event), 1.0).grants[0]
    assert grant.devices == gpus[:count]
    decode, learn = seated(members[0]), seated(members[1])
    grant = Grant(grant.rollouts, grant.trainers, grant.devices)
    assign_devices(
        workers_of(RunSpec.model_validate(event.spec), grant, [decode], [learn]), set(), joined=False
    )
    assert decode.devices == tuple(gpus[:4]) and len(learn.devices) == 1


def test_a_model_with_a_cpu_slot_of_its_own_waits_for_one():
    members = [instance(f"{kind}-0", "h1", CORES, kind) for kind in ("rollout", "trainer", "simulator")]
    plan = plan_admission(state_of(members, apart(1, mode="collocated")), 1.0)
    assert plan.grants[0].devices == CORES
    plan = plan_admission(state_of(members, apart(1, mode="disaggregated")), 1.0)
    assert not plan.grants and plan.waiting["a"].startswith("3 devices on h1 (2 free of 2")


def test_a_device_that_only_one_side_sees_is_its_own():
    rollout = member(instance("rollout-0", "h1", [CORES[0]]))
    trainer = member(instance("trainer-0", "h2", CORES, "trainer"))
    rollout_first = default_devices(
        placed(PlacementSection(mode="disaggregated")), CORES[::-1], [rollout], [trainer]
    )
    assert list(rollout_first.values()) == [[CORES[0]], [CORES[1]]]


async def test_a_supervisor_proves_the_end_of_its_own_host_s_holder_of_a_shared_device():
    event_log = EventLog(MemoryStore(), lambda: 0.0)
    await event_log.open("test", None)
    fleet = Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())
    ours, other = (
        LeaseRequest(who, "r", "learn", (device,), who) for who, device in zip("ab", CORES, strict=True)
    )
    event_log.post(*plan_grant(event_log.state.table, [ours, other]))
    event_log.post(
        ev.LeaseEnded(
            at=0, epoch=event_log.state.table.holders_of(CORES[0])[0].epoch, cause="x", proven=False
        )
    )
    fleet.supervised(Supervisor("a", lambda command, body: None))
    assert not event_log.state.table.quarantined and event_log.state.table.holders_of(CORES[1])
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
