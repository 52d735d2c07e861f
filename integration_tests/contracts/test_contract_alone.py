"""Every service on its own: health, reflection, tokens, fencing, and what it does not serve yet."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness.processes import clean_environment, free_port
from harness.services.alone import KINDS, SERVICES, Service, channel_to, refused
from harness.services.by_hand import header
from harness.valkey import Valkey
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc

MODULES = {
    "rollout": (rollout_pb2, rollout_pb2_grpc.RolloutServiceStub),
    "trainer": (trainer_pb2, trainer_pb2_grpc.TrainerServiceStub),
    "reward": (reward_pb2, reward_pb2_grpc.RewardServiceStub),
    "simulator": (simulator_pb2, simulator_pb2_grpc.SimulatorServiceStub),
}
TOKEN = "a secret of this test"
EPOCH = 5


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """All four, with a token and reflection, started together."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    flags = ("--token-file", str(folder / "token"), "--reflection")
    made = {kind: Service(kind, folder / kind, *flags) for kind in KINDS}
    try:
        yield {kind: service.wait_until_serving() for kind, service in made.items()}
    finally:
        statuses = {kind: service.stop() for kind, service in made.items()}
    assert set(statuses.values()) == {0}, statuses
    left = [path for service in made.values() for path in service.shared_memory.glob("*")]
    assert not left, f"shared memory is left behind: {left}"


@pytest.fixture
def call(services):
    """Calls a method of a service with the token, or with another one."""

    def call(kind, method, request, token=TOKEN):
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        descriptor = MODULES[kind][0].DESCRIPTOR.services_by_name[SERVICES[kind].split(".")[-1]]
        streams = descriptor.methods_by_name[method]
        with channel_to(services[kind].address) as channel:
            stub = getattr(MODULES[kind][1](channel), method)
            sent = iter([request]) if streams.client_streaming else request
            answer = stub(sent, timeout=60, metadata=metadata)
            return list(answer) if streams.server_streaming else answer

    return call


def methods(kind):
    return MODULES[kind][0].DESCRIPTOR.services_by_name[SERVICES[kind].split(".")[-1]].methods


def request_of(kind, method, authority):
    """An empty request with its header, wherever that is."""
    message = getattr(MODULES[kind][0], method.input_type.name)()
    if "header" in method.input_type.fields_by_name:
        message.header.CopyFrom(authority)
    elif method.name in ("Generate", "RunEpisodes"):
        message.open.header.CopyFrom(authority)
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_health_needs_no_token(services, kind):
    for name in ("", SERVICES[kind]):
        assert services[kind].health(name) == health_pb2.HealthCheckResponse.SERVING
    assert services[kind].health("headrace.nothing.v1.Nothing") == health_pb2.HealthCheckResponse.UNKNOWN


def reflected(address, token):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with channel_to(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=30, metadata=metadata)
    return {service.name for service in answer.list_services_response.service}


@pytest.mark.parametrize("kind", KINDS)
def test_reflection_lists_the_service_when_asked_for(services, kind):
    assert SERVICES[kind] in reflected(services[kind].address, TOKEN)


def test_reflection_is_off_unless_asked_for(tmp_path):
    with Service("reward", tmp_path / "reward") as service:
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            reflected(service.address, "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_refuses_a_caller_without_the_token(call, kind):
    for method in methods(kind):
        for wrong in ("", "another secret"):
            with refused(grpc.StatusCode.UNAUTHENTICATED) as sentence:
                call(kind, method.name, request_of(kind, method, header(coordinator_epoch=EPOCH)), wrong)
            assert TOKEN not in sentence[0]


# What needs no authority: it only reads, or only begins what is checked by each message (StepLocally), or an instance
# asks it of another (Follow).
OPEN = {"ListScorers", "ListEnvironments", "Render", "StepLocally", "Follow"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_of_a_past_coordinator_is_refused(call, kind):
    close = "ClosePool" if kind == "simulator" else "CloseRun"
    first = next(method for method in methods(kind) if method.name == close)
    try:
        call(kind, close, request_of(kind, first, header(coordinator_epoch=EPOCH)))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND  # the epoch is taken notice of all the same
    for method in methods(kind):
        if method.name not in OPEN:
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE") as sentence:
                call(kind, method.name, request_of(kind, method, header(coordinator_epoch=EPOCH - 1)))
            assert str(EPOCH) in sentence[0], method.name


DEVICE = {
    "rollout": ("Generate", "RunEpisodes", "Score", "InstallPolicy", "Wake"),
    "trainer": ("Restore", "BeginStep", "Learn", "CommitStep", "Infer", "Wake"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in DEVICE.items() for name in names])
def test_what_uses_the_device_needs_a_lease(call, kind, name):
    method = next(method for method in methods(kind) if method.name == name)
    for lease in (0, 7):
        authority = header(lease_epoch=lease, coordinator_epoch=EPOCH)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE") as sentence:
            call(kind, name, request_of(kind, method, authority))
        assert str(lease) in sentence[0]


@pytest.mark.parametrize("kind", ["rollout", "trainer", "reward"])
def test_a_run_that_is_not_open_is_named(call, kind):
    requests = {
        "rollout": ("ListInventory", rollout_pb2.ListInventoryRequest()),
        "trainer": ("PublishPolicy", trainer_pb2.PublishPolicyRequest()),
        "reward": ("Score", reward_pb2.ScoreRequest()),
    }
    name, request = requests[kind]
    request.header.CopyFrom(header(coordinator_epoch=EPOCH, run="runs/nowhere"))
    if kind == "reward":
        request.items.add(completion="1")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "NOT_OPEN") as sentence:
        call(kind, name, request)
    assert "runs/nowhere" in sentence[0]


@pytest.mark.parametrize("kind", ["rollout", "trainer", "reward"])
def test_a_config_that_is_wrong_names_its_key(call, kind):
    opening = MODULES[kind][0].OpenRunRequest(header=header(coordinator_epoch=EPOCH))
    good = {
        "rollout": '"model": {"path": "x"}, "rollout": {}, "seed": 0',
        "trainer": '"model": {"path": "x"}',
        "reward": '"scorers": [{"name": "exact"}]',
    }
    opening.config_json = f'{{{good[kind]}, "no_such_key": 1}}'
    if kind == "trainer":
        opening.run_directory = "/tmp"
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as sentence:
        call(kind, "OpenRun", opening)
    assert "no_such_key" in sentence[0]


@pytest.fixture(scope="module")
def beyond_loopback(tmp_path_factory):
    """(exit status, what it said) by kind, of starts that would be reachable from elsewhere without a token."""
    folder = tmp_path_factory.mktemp("beyond")
    with Valkey(folder / "store") as store:
        commands = {kind: ("--listen", "0.0.0.0:0", "--shm-dir", str(folder / kind)) for kind in KINDS}
        commands["coordinator"] = (
            *("--listen", f"0.0.0.0:{free_port()}", "--http", f"127.0.0.1:{free_port()}"),
            *("--redis", store.url, "--data-dir", str(folder / "coordinator")),
        )
        started = {
            kind: subprocess.Popen(
                [sys.executable, "-m", f"headrace_{kind}", *flags],
                env=clean_environment(),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for kind, flags in commands.items()
        }
        try:
            yield {
                kind: (process.communicate(timeout=180)[0], process.returncode)
                for kind, process in started.items()
            }
        finally:
            for process in started.values():
                process.kill()


@pytest.mark.parametrize("kind", [*KINDS, "coordinator"])
def test_nobody_listens_beyond_loopback_without_a_token(beyond_loopback, kind):
    said, status = beyond_loopback[kind]
    assert status not in (0, None)
    assert "refusing to listen on 0.0.0.0" in said and "token" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistyped_flag_is_exit_code_2(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, "-m", f"headrace_{kind}", "--devices", "tpu:0"],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "--devices" in done.stderr and "Traceback" not in done.stderr
