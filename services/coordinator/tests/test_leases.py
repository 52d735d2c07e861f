"""The lease reducer: exclusive, fenced, all or none, whatever happens in whatever order."""

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices import leases
from headrace_coordinator.domain.devices.leases import Blocked, Lease, LeaseRequest, LeaseTable
from headrace_schema.gpu_defaults import GIB, asleep_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

DEVICES = ["h/cpu:0", "h/cpu:1", "h/cpu:2"]
HOLDERS = ["a", "b", "c"]


def request(holder, *devices):
    return LeaseRequest(holder, "run", "learn", devices)


def grant(table, *requests):
    for event in leases.plan_grant(table, requests):
        table.apply(event)


def test_all_or_none():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    with pytest.raises(Blocked, match="h/cpu:0 is held by a for run learn"):
        grant(table, request("b", "h/cpu:0"), request("c", "h/cpu:1"))
    assert table.holders_of("h/cpu:1") == []


def test_one_device_is_not_granted_twice_in_one_set():
    with pytest.raises(Blocked, match="wanted twice"):
        grant(LeaseTable(), request("a", "h/cpu:0"), request("b", "h/cpu:0"))


def part(holder: str, memory: float, run: str = "run") -> LeaseRequest:
    return LeaseRequest(holder, run, "act", ("h/gpu:0",), memory_part=memory)


def test_holders_of_one_run_share_a_device_as_far_as_its_memory_goes():
    table = LeaseTable()
    grant(table, part("rollout", 0.7), part("simulator", 0.3))
    assert [lease.incarnation for lease in table.holders_of("h/gpu:0")] == ["rollout", "simulator"]
    with pytest.raises(Blocked, match=r"held by rollout for run act .* and simulator for run act"):
        grant(table, part("third", 0.1))
    table.apply(leases.plan_release(table, 2, "simulator", "released")[0])
    for other in (part("third", 0.4), part("third", 0.1, run="other"), request("third", "h/gpu:0")):
        with pytest.raises(Blocked, match=r"held by rollout for run act \(epoch 1\)"):
            grant(table, other)
    grant(table, part("simulator", 0.3))
    with pytest.raises(Blocked, match="wanted twice"):
        grant(LeaseTable(), part("rollout", 0.7), part("simulator", 0.4))


def test_only_the_holder_can_release_or_acknowledge():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    assert leases.plan_release(table, 1, "b", "released") == []
    assert leases.plan_held(table, 1, "b") == []
    assert leases.plan_held(table, 1, "a") != []


def test_unrenewed_lease_quarantines_its_devices_until_the_exit_is_proven():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    (expired,) = leases.plan_expire(table, {1: 0.0}, {}, ttl=30.0, now=31.0)
    table.apply(expired)
    with pytest.raises(Blocked, match="quarantined: a is not proven gone"):
        grant(table, request("b", "h/cpu:0"))
    table.apply(ev.InstanceLost(at=32.0, incarnation="a", reason="killed", proven=True))
    grant(table, request("b", "h/cpu:0"))
    assert table.holders_of("h/cpu:0")[0].epoch == 2


def test_renewed_lease_does_not_expire_but_an_overdue_revoke_does():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    assert leases.plan_expire(table, {1: 25.0}, {1: 30.0}, ttl=30.0, now=31.0) == []
    table.apply(leases.plan_revoke(table, 1)[0])
    (overdue,) = leases.plan_expire(table, {1: 41.0}, {1: 40.0}, ttl=30.0, now=41.0)
    assert overdue.cause == "revoked past notice"


def test_epochs_leap_over_a_restart():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    table.apply(ev.CoordinatorStarted(at=0.0, epoch=2, store_id="s", leap=1000))
    grant(table, request("b", "h/cpu:1"))
    assert table.holders_of("h/cpu:1")[0].epoch == 1002


class LeaseMachine(RuleBasedStateMachine):
    """Any order of requests, releases, expiries and exits."""

    def __init__(self):
        super().__init__()
        self.table, self.now, self.epochs = LeaseTable(), 0.0, []

    @rule(holder=st.sampled_from(HOLDERS), devices=st.sets(st.sampled_from(DEVICES), min_size=1))
    def ask(self, holder, devices):
        try:
            events = leases.plan_grant(self.table, [request(holder, *sorted(devices))])
        except Blocked:
            busy = {d for lease in self.table.leases.values() for d in lease.devices} | set(
                self.table.quarantined
            )
            assert busy & devices
            return
        self.epochs += [event.epoch for event in events]
        for event in events:
            self.table.apply(event)

    @precondition(lambda self: self.table.leases)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def release(self, data, holder):
        epoch = data.draw(st.sampled_from(sorted(self.table.leases)))
        owner = self.table.leases[epoch].incarnation
        events = leases.plan_release(self.table, epoch, holder, "released")
        assert bool(events) == (owner == holder)
        for event in events:
            self.table.apply(event)

    @rule(step=st.floats(1, 40))
    def time_passes(self, step):
        self.now += step
        renewed = dict.fromkeys(self.table.leases, self.now - step)
        for event in leases.plan_expire(self.table, renewed, {}, 30.0, self.now):
            self.table.apply(event)

    @rule(holder=st.sampled_from(HOLDERS))
    def exit(self, holder):
        for event in leases.plan_exit(self.table, holder):
            self.table.apply(event)
        self.table.apply(ev.InstanceLost(at=self.now, incarnation=holder, reason="exit", proven=True))
        assert not self.table.of(holder)
        assert all(q.incarnation != holder for q in self.table.quarantined.values())

    @invariant()
    def no_device_has_two_holders(self):
        used = [d for lease in self.table.leases.values() for d in lease.devices] + list(
            self.table.quarantined
        )
        assert len(used) == len(set(used))

    @invariant()
    def epochs_only_rise(self):
        assert self.epochs == sorted(set(self.epochs))


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.permutations(["x", "y", "z"]))
def test_renewals_of_other_leases_do_not_matter(order):
    table = LeaseTable()
    for index, holder in enumerate(order):
        grant(table, request(holder, DEVICES[index]))
    expired = leases.plan_expire(table, {1: 0.0, 2: 100.0, 3: 100.0}, {}, 30.0, 100.0)
    assert [event.epoch for event in expired] == [1]


def test_a_gpu_that_still_holds_more_than_planned_is_quarantined_with_the_figure():
    gpu = "GPU-8f2a/gpu:0"
    for used, expected, free in ((0, 100, True), (100, 100, True), (3 * 2**30, 2**30, False)):
        table = LeaseTable()
        grant(table, request("a", gpu))
        [ended] = leases.plan_release(table, 1, "a", "released", used=used, expected=expected)
        table.apply(ended)
        assert (gpu not in table.quarantined) is free
    assert "3072 MiB are still in use there and 1024 are planned" in table.quarantined[gpu].reason


def test_a_resident_set_says_nothing_about_a_core():
    table = LeaseTable()
    grant(table, request("a", "h/cpu:0"))
    [ended] = leases.plan_release(table, 1, "a", "released", used=2**40)
    table.apply(ended)
    assert not table.quarantined


@pytest.mark.parametrize(
    ("engine", "stage", "used", "free"),
    [
        ("vllm", "generate", asleep_limit(40 * GIB) + asleep_limit(80 * GIB), True),
        ("vllm", "generate", asleep_limit(40 * GIB) + asleep_limit(80 * GIB) + 1, False),
        ("vllm", "decode", 7 * GIB, True),
        ("vllm", "learn", 7 * GIB, False),
        ("transformers", "generate", leases.KEPT_BYTES, True),
        ("transformers", "generate", leases.KEPT_BYTES + 1, False),
    ],
)
def test_a_sleeping_engine_may_keep_its_contexts_and_no_other_holder(engine, stage, used, free):
    lease = Lease(1, "a", "r", stage, ["GPU-1/gpu:0", "GPU-2/gpu:1"])
    memory = {"GPU-1/gpu:0": 40 * GIB, "GPU-2/gpu:1": 80 * GIB}
    assert (used <= leases.kept_bytes(lease, engine, memory)) is free
