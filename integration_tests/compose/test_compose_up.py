"""`docker compose up -d --wait && headrace run submit … --watch`, and what containers may and may not do."""

from __future__ import annotations

import pytest
from compose.fleet import ENDLESS
from harness.ledger import audit
from harness.waiting import wait_for

SERVICES = ("coordinator", "rollout", "trainer", "reward", "simulator")
EVERYTHING = (*SERVICES, "redis", "secrets", "models")
MEGABYTES = {"coordinator": 400, "reward": 700}

FIND_TORCH = "import importlib.util; print(importlib.util.find_spec('torch'))"
CALL_WITHOUT_TOKEN = """
import grpc
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
stub = reward_pb2_grpc.RewardServiceStub(grpc.insecure_channel("reward:7000"))
try:
    stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=10)
except grpc.RpcError as error:
    print(error.code().name)
"""
CALL_OUTSIDE = """
import socket
try:
    socket.create_connection(("192.0.2.1", 80), timeout=3)
except OSError as error:
    print(error.strerror)
"""


def test_the_example_runs_from_outside(fleet):
    fleet.headrace("run", "submit", "examples/tiny.yaml", "--set", "steps=3", "--watch")
    run = fleet.client.get(fleet.client.list()[0].id)
    assert run.state == "SUCCEEDED"
    assert len(audit(fleet, run).trained) == 3 * 16 * 8
    assert "config.json" in fleet.inside("coordinator", "ls", run.export_path)


@pytest.mark.parametrize("service", ["rollout", "trainer", "simulator"])
def test_an_instance_finds_its_containers_devices(fleet, service):
    assert all(instance.devices for instance in fleet.instances(service))
    assert fleet.instances(service)


def test_a_users_own_scorer_is_found_where_the_spec_names_it(fleet):
    settings = ("--set", "steps=1", "--set", "model.path=/models/tiny")
    fleet.headrace("run", "submit", "examples/own_reward.yaml", *settings, "--watch")


@pytest.mark.parametrize("service", EVERYTHING)
def test_a_container_has_no_rights_and_limits(fleet, service):
    found = fleet.inspect(service)
    host, state = found["HostConfig"], found["State"]
    assert found["Config"]["User"] == "10001:10001"
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"] and not host["Privileged"]
    assert host["Memory"] > 0 and host["PidsLimit"] > 0
    ports = [(port, bound) for port, bound in host["PortBindings"].items() if bound]
    if service == "coordinator":
        assert ports == [("8470/tcp", [{"HostIp": "127.0.0.1", "HostPort": str(fleet.port)}])]
    else:
        assert ports == []
    if service in ("secrets", "models"):
        assert state["Status"] == "exited" and state["ExitCode"] == 0
    else:
        assert state["Health"]["Status"] == "healthy"


@pytest.mark.parametrize("service", MEGABYTES)
def test_an_image_holds_what_its_service_needs_and_no_torch(fleet, service):
    assert fleet.inside(service, "python", "-c", FIND_TORCH).strip() == "None"
    size = fleet.image_bytes(service) / 1e6
    assert size < MEGABYTES[service], f"{service}: {size:.0f} MB"


def test_calls_without_the_token_are_refused_and_there_is_no_way_out(fleet):
    assert fleet.inside("rollout", "python", "-c", CALL_WITHOUT_TOKEN).strip() == "UNAUTHENTICATED"
    assert "NOAUTH" in fleet.inside("redis", "redis-cli", "get", "headrace:leader")
    assert "unreachable" in fleet.inside("rollout", "python", "-c", CALL_OUTSIDE)


def test_weights_go_through_the_shared_memory(fleet, spec_of):
    run = fleet.submit(spec_of(steps=ENDLESS))
    _wait_for_weights(fleet, "-links", "2")  # the rollout keeps the trainer's very file
    fleet.goes_on(run)


def test_weights_go_over_grpc_to_another_host(fleet, spec_of):
    fleet.up(overlays=("two_hosts.yaml",))
    try:
        run = fleet.submit(spec_of(steps=ENDLESS))
        _wait_for_weights(fleet, "-links", "1")  # a copy of its own: nobody else sees this memory
        fleet.goes_on(run)
    finally:
        fleet.up()


def _wait_for_weights(fleet, *tests):
    """A body in the rollout's memory that passes `find`'s tests; one may go while find looks, which is no error."""
    command = f"find /weights -name '*.weights' {' '.join(tests)} 2>/dev/null || true"
    wait_for(
        lambda: fleet.inside("rollout", "sh", "-c", command).strip(), "weights in the rollout's memory", 60
    )
