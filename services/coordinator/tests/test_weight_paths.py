"""A version goes to each host once: whom each receiver asks."""

from headrace.common.v1 import common_pb2 as common
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.run.devices.leasing import CHAIN, sources_of

ORIGIN = common.WeightSource(incarnation="trainer", transports=[common.WEIGHT_TRANSPORT_SHM])


def rollout(name, host):
    return InstanceState(name, name, "rollout", host, f"{host}:1", [], {})


def asked(receivers, holders=()):
    found = sources_of(receivers, holders, ORIGIN, "head")
    hosts = {each.host for each in receivers} - {"head"}
    assert all(
        (sources[-1].incarnation, sources[-1].receivers) == ("trainer", max(1, len(hosts)))
        for sources in found.values()
    )
    return {who: [(each.incarnation, each.relay) for each in sources[:-1]] for who, sources in found.items()}


def test_each_host_asks_the_one_before_it_and_at_last_the_trainer():
    receivers = [rollout("c0", "c"), rollout("b1", "b"), rollout("b0", "b"), rollout("h", "head")]
    assert asked(receivers) == {"h": [], "b0": [], "b1": [], "c0": [("b0", True), ("b1", True)]}


def test_a_host_beside_a_trainer_of_parts_is_a_receiver_too():
    parts = common.WeightSource(incarnation="trainer", parts=[common.WeightPart(tensors=1)])
    found = sources_of([rollout("h", "head"), rollout("b", "b")], [], parts, "head")
    assert {each[-1].receivers for each in found.values()} == {2}


def test_a_host_that_comes_late_asks_one_that_has_it():
    assert asked([rollout("c0", "c")], [rollout("h", "head"), rollout("b0", "b")]) == {"c0": [("b0", False)]}
    assert asked([rollout("c0", "c")], [rollout("h", "head")]) == {"c0": []}


def test_many_hosts_are_several_chains():
    found = asked([rollout(f"r{n:02}", f"h{n:02}") for n in range(CHAIN + 2)])
    assert [who for who, peers in found.items() if not peers] == ["r00", f"r{CHAIN:02}"]
    assert found[f"r{CHAIN + 1:02}"] == [(f"r{CHAIN:02}", True)]
