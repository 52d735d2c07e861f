"""Each service from its wheel in an empty environment: what it declares is what it needs."""

import os
import signal
import subprocess
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace_servicekit.rpc.addresses import free_port

pytestmark = pytest.mark.timeout(900)
START_S = 120
STOP_S = 60
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
extra = tuple(sys.argv[2:])
names = [name for name in names if not name.startswith(extra) or name.endswith(".options")]
wanted = [name for name in names if not name.endswith("__main__")]
print(len([importlib.import_module(name) for name in wanted]))
"""
OF_EXTRAS = (
    "headrace_rollout.engines.vllm.",
    *(
        f"headrace_simulator.backends.conversation.{name}"
        for name in ("reasoning_gym", "skyrl_gym", "textarena")
    ),
)
"""What only an extra can import."""
HAS = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]) is not None)"
COMMON = {"headrace-proto", "headrace-schema", "headrace-servicekit"}
PLANNER = "headrace-planner"
LIBRARIES = {"coordinator": {PLANNER}, "reward": set(), "simulator": {"headrace-robots"}}
WITHOUT_TORCH = {
    "coordinator": {"reasoning-gym": "reasoning_gym"},
    "reward": {"math": "math_verify", "reasoning-gym": "reasoning_gym"},
    "simulator": {"gymnasium": "gymnasium"},
}


def health_of(address):
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status
        except grpc.RpcError:
            return None


def starts_and_stops(environment, package, *options):
    """Starts the process, waits until it reports healthy, ends it with SIGTERM; nothing may be left of it."""
    assert "--listen" in environment.run("-m", package, "--help")
    address = f"127.0.0.1:{free_port()}"
    process = environment.start("-m", package, "--listen", address, *options)
    try:
        deadline = time.monotonic() + START_S
        while health_of(address) != health_pb2.HealthCheckResponse.SERVING:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, f"{package} is not healthy after {START_S} s"
            time.sleep(0.2)
        process.terminate()
        output, _ = process.communicate(timeout=STOP_S)
        assert process.returncode == 0, output
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def imports_all(environment, package):
    """Imports every module of a package, so that a library which no dist declares is found out."""
    environment.pip("check")
    assert int(environment.run("-c", IMPORT_ALL, package, *OF_EXTRAS)) > 5


@pytest.mark.parametrize(
    "service",
    # The images of these two are built from the same requirements in each CI.
    ["coordinator", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("reward", "simulator"))],
)
def test_a_service_installs_alone_and_without_torch(service, make_environment, tmp_path, valkey):
    extras = WITHOUT_TORCH[service]
    options = ["--data-dir", str(tmp_path / "data")]
    options += ["--redis", valkey, "--http", f"127.0.0.1:{free_port()}"] if service == "coordinator" else []
    environment = make_environment(service)
    shared = sorted(COMMON | LIBRARIES[service])
    environment.install(*shared, f"headrace-{service}")
    assert environment.headrace_dists() == {*shared, f"headrace-{service}"}
    starts_and_stops(environment, f"headrace_{service}", *options)

    environment.install(*shared, f"headrace-{service}[{','.join(extras)}]")
    for module in extras.values():
        assert environment.run("-c", HAS, module).strip() == "True"
    imports_all(environment, f"headrace_{service}")
    starts_and_stops(environment, f"headrace_{service}", *options)
    assert environment.run("-c", HAS, "torch").strip() == "False"


@pytest.fixture(scope="module")
def torch_environment(make_environment):
    """One environment with torch for both services that need it: it takes a minute and a gigabyte."""
    environment = make_environment("torch")
    environment.pip(
        "install", "-q", "--no-compile", *torch_source(), "--no-deps", "-c", "constraints/base.txt", "torch"
    )
    return environment


def torch_source():
    """Where `make setup` was told to take torch from."""
    options = {"TORCH_FIND_LINKS": "--find-links", "TORCH_INDEX_URL": "--index-url"}
    return [part for key, flag in options.items() if os.environ.get(key) for part in (flag, os.environ[key])]


@pytest.mark.parametrize(
    "service", ["rollout", pytest.param("trainer", marks=pytest.mark.nightly)]
)  # as above
def test_a_service_on_torch_installs_alone(service, torch_environment, tmp_path):
    needed = [*sorted(COMMON), "headrace-modelkit", "headrace-robots", f"headrace-{service}"]
    torch_environment.install(*needed)
    assert torch_environment.headrace_dists() == set(needed)
    for package in (f"headrace_{service}", "headrace_robots.policies", f"headrace_robots.{service}"):
        imports_all(torch_environment, package)
    directories = ["--data-dir", str(tmp_path), "--shm-dir", str(tmp_path / "shm")]
    starts_and_stops(torch_environment, f"headrace_{service}", *directories)
    torch_environment.pip("uninstall", "-q", "-y", *needed)


def test_the_command_line_comes_without_services_or_torch(make_environment):
    environment = make_environment("cli")
    environment.install(*sorted(COMMON), PLANNER, "headrace")
    assert environment.headrace_dists() == COMMON | {PLANNER, "headrace"}
    environment.pip("check")
    # Both are portions of one namespace, from two wheels.
    environment.run("-c", "import headrace.client, headrace.common.v1.common_pb2")
    command = environment.directory / "bin" / "headrace"
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "demo" in shown.stdout
    assert environment.run("-c", HAS, "torch").strip() == "False"

    environment.install(*sorted(COMMON), PLANNER, "headrace-coordinator", "headrace")
    environment.run(
        "-c",
        "import headrace.client, headrace.coordinator.v1.fleet_pb2, headrace_coordinator.api.submission.rules",
    )
