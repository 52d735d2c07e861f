"""`docker compose up -d --wait && headrace run submit … --watch`, and what containers may and may not do."""

from __future__ import annotations

import json

import pytest
from compose.fleet import ENDLESS, HERE
from harness.ledger import audit
from harness.waiting import wait_for

SERVICES = ("coordinator", "rollout", "trainer", "reward", "simulator")
EVERYTHING = (*SERVICES, "redis", "secrets", "models")
WITH_USERS_CODE = ("reward", "simulator")
CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SYS_PTRACE": 19,
}
"""What services with users' code have, by the kernel's numbers."""
SHOW_PROCESSES = """
import json, psutil
for process in psutil.process_iter(["cmdline", "uids", "pid"]):
    if (process.info["cmdline"] or [])[1:2] == ["-m"]:
        lines = open(f"/proc/{process.info['pid']}/status").read().splitlines()
        sets = {line.split(":")[0]: int(line.split()[1], 16) for line in lines if line.startswith("Cap")}
        print(json.dumps([process.info["cmdline"][2], list(process.info["uids"]), sets]))
"""
MEGABYTES = {"coordinator": 550, "reward": 700}
"""The coordinator's image has the clients of Kubernetes (85 MB), which the scaler needs, and of S3."""

FIND_TORCH = "import importlib.util; print(importlib.util.find_spec('torch'))"
CALL_REWARD = """
import grpc
from pathlib import Path
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.rpc.tls import INSTANCE_NAME, channel_credentials
named = [("grpc.ssl_target_name_override", INSTANCE_NAME)]
token = ("authorization", "Bearer " + Path("/secrets/fleet/fleet-token").read_text().strip())
known = grpc.secure_channel("reward:7000", channel_credentials(), named)
for channel, shown in ((grpc.insecure_channel("reward:7000"), [token]), (known, []), (known, [token])):
    try:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        stub.ListScorers(reward_pb2.ListScorersRequest(), metadata=shown, timeout=10)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name)
"""
"""Without a certificate, without the token, and with both."""
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
    with_code = service in WITH_USERS_CODE
    assert found["Config"]["User"] == ("0:0" if with_code else "10001:10001")
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    added = {name.removeprefix("CAP_") for name in host["CapAdd"] or ()}
    assert added == (CAPABILITIES.keys() if with_code else set())
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


@pytest.mark.parametrize("service", ("coordinator", "rollout", "trainer", "reward", "simulator"))
def test_a_service_is_user_10001_with_no_more_than_what_gives_users_code_another_id(fleet, service):
    shown = [json.loads(line) for line in fleet.inside(service, "python", "-c", SHOW_PROCESSES).splitlines()]
    ours = {
        name: (uids, sets)
        for name, uids, sets in shown
        if name.startswith("headrace_") and "probe" not in name
    }
    assert {f"headrace_{service}", "headrace_servicekit.process.supervise"} <= ours.keys()
    held = sum(1 << number for number in CAPABILITIES.values()) if service in WITH_USERS_CODE else 0
    for name in (f"headrace_{service}", "headrace_servicekit.process.supervise"):
        uids, sets = ours[name]
        assert uids == [10001] * 3, name
        assert sets == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), held), name


def test_a_users_scorer_reaches_nothing_of_its_service(fleet, spec_of):
    fleet.succeed(fleet.submit(spec_of(reward={"scorers": [{"name": f"{HERE}/reaching.py:score"}]})))
    lines = fleet.compose("logs", "--no-color", "--no-log-prefix", "reward").splitlines()
    said = [json.loads(line.partition("FOUND ")[2]) for line in lines if "FOUND {" in line]
    assert said, fleet.logs()
    for found in said:
        assert found["service"][1:] == ["-m", "headrace_reward"]
        assert found["reached"] == ["its own home"]
        assert not {0, 10001} & set(found["user"]) and found["groups"] == []
        assert found["capabilities"].strip("0") == ""


@pytest.mark.parametrize("service", WITH_USERS_CODE)
def test_a_service_says_what_it_does_not_hold_of_users_code(fleet, service):
    """What compose does not give: namespaces. Another user id is held, so nothing is said of it."""
    (said,) = {tuple(each.capabilities.get("not_held", ())) for each in fleet.instances(service)}
    assert not any("user id" in text for text in said)
    assert any("what is open to all: no mounts of its own" in text for text in said)


@pytest.mark.parametrize("service", MEGABYTES)
def test_an_image_holds_what_its_service_needs_and_no_torch(fleet, service):
    assert fleet.inside(service, "python", "-c", FIND_TORCH).strip() == "None"
    size = fleet.image_bytes(service) / 1e6
    assert size < MEGABYTES[service], f"{service}: {size:.0f} MB"


def test_a_call_needs_certificate_token_and_role_and_there_is_no_way_out(fleet):
    said = {
        role: fleet.inside(role, "python", "-c", CALL_REWARD).split() for role in ("coordinator", "rollout")
    }
    assert said["coordinator"] == ["UNAVAILABLE", "UNAUTHENTICATED", "OK"]
    assert said["rollout"] == ["UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED"]
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
