"""What tests of each service's provider share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from headrace_containers.provider import Limits, Spec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from remote_local import Local, missing
from remote_stubs import Service


@pytest.fixture(params=["recorded", "package"])
def service_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Service]:
    """Makes a stubbed service of a package; see `remote_stubs`."""
    return lambda package: Service(package, request.param == "package", monkeypatch)


@pytest.fixture
def machine() -> Iterator[Local]:
    """What the stubbed service runs."""
    if why := missing():
        pytest.skip(f"containers of namespaces: {why}")
    made = Local(Spec(image="here"))
    yield made
    made.end()


@pytest.fixture
def spec() -> Spec:
    """What every service can hold, with `unheld`."""
    return Spec(image="python:3.11-slim", limits=Limits(cpus=2, memory_mib=1024, disk_mib=2048, wall_s=600))
