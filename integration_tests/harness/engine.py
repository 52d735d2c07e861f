"""Containers need an engine: one that answers, or one that the script in DOCKER_ENGINE_SCRIPT starts.

That script takes `up`, `base` (makes the base images where there is no registry) and `down`; `.ci/run` names
`ci/container_engine.sh`. Without either the tests are skipped, and fail under CI=true.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.processes import ROOT

ENGINE = ROOT / ".cache" / "docker"
APT_LOCK = ROOT / ".cache" / "apt.lock"
"""Whoever runs apt-get in this checkout holds it; see ci/apt.sh."""
BASES = ("python:3.11-slim", "redis:7-alpine")


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
