"""Containers need an engine: one that answers, or one that the script in DOCKER_ENGINE_SCRIPT starts.

That script takes `up`, `base` (makes the base images where there is no registry) and `down`; `.ci/run` names
`ci/container_engine.sh`. Without either the tests are skipped, and fail under CI=true.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compose.fleet import ComposeFleet, run
from harness.processes import ROOT
from harness.specs import small_spec

ENGINE = ROOT / ".cache" / "docker"
APT_LOCK = ROOT / ".cache" / "apt.lock"
"""Whoever runs apt-get in this checkout holds it; see ci/apt.sh."""
BASES = ("python:3.11-slim", "redis:7-alpine")
WHEELS = ROOT / ".cache" / "wheels"
TEST_S = 420


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "compose" and item.get_closest_marker("timeout") is None:
            # The first one also starts the engine.
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture(scope="session")
def engine() -> Iterator[None]:
    """A Docker engine that answers."""
    if _answers():
        yield
        return
    script = os.environ.get("DOCKER_ENGINE_SCRIPT", "")
    if not Path(script).is_file():
        _cannot_run("no Docker engine answers, and DOCKER_ENGINE_SCRIPT names no script that starts one")
    os.environ.setdefault("DOCKER_WORK", str(ENGINE))
    os.environ.setdefault("DOCKER_CONFIG", str(Path(os.environ["DOCKER_WORK"]) / "config"))
    Path(os.environ["DOCKER_WORK"]).mkdir(parents=True, exist_ok=True)
    try:
        with _apt_is_ours():  # it installs what the engine needs
            subprocess.run(["bash", script, "up"], check=True, timeout=300, stdin=subprocess.DEVNULL)
        if not _has_bases():
            subprocess.run(["bash", script, "base"], check=True, timeout=300, stdin=subprocess.DEVNULL)
        yield
    finally:
        subprocess.run(["bash", script, "down"], timeout=60, stdin=subprocess.DEVNULL)


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "info"], capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    return asked.returncode == 0


def _has_bases() -> bool:
    """Whether a former session, or the part that builds the images, has made the base images."""
    asked = subprocess.run(
        ["docker", "image", "inspect", *BASES], capture_output=True, timeout=60, stdin=subprocess.DEVNULL
    )
    return asked.returncode == 0


@contextmanager
def _apt_is_ours() -> Iterator[None]:
    APT_LOCK.parent.mkdir(parents=True, exist_ok=True)
    with APT_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cannot_run(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def torch_wheels() -> Path:
    """A folder with the torch wheel of this environment if it is a CPU build, else an empty one."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu") and not list(WHEELS.glob("torch-*.whl")):
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WHEELS)]
        run([*download, f"torch=={torch.partition('+')[0]}"], timeout_s=300)
    return WHEELS


@pytest.fixture(scope="session")
def fleet(engine: None, torch_wheels: Path) -> Iterator[ComposeFleet]:
    """The containers that all tests share."""
    composed = ComposeFleet(torch_wheels)
    try:
        composed.compose("build", "--quiet", timeout_s=900)
        composed.up()
        yield composed
    finally:
        composed.down()


@pytest.fixture(autouse=True)
def no_run_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the runs that a failed test left: they would keep the instances from the next one."""
    composed: ComposeFleet | None = (
        request.getfixturevalue("fleet") if "fleet" in request.fixturenames else None
    )
    yield
    for left in (
        composed.client.list() if composed else ()
    ):  # asked of the client of now: `up` makes another one
        if not left.ended:
            composed.client.cancel(left.id)


@pytest.fixture
def spec_of() -> Callable[..., dict[str, Any]]:
    """Makes small run specs on the model in the volume; see `small_spec`."""

    def make(**overrides: Any) -> dict[str, Any]:
        return small_spec(Path("/models/tiny"), **overrides)

    return make
