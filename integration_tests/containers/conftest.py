"""Containers on a real engine; see `harness.engine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers.brokers import BrokerProcess, containers_of
from harness.waiting import wait_for
from headrace_containers.docker.engine import owner
from headrace_containers.docker.options import DockerOptions
from headrace_containers.docker.provider import DockerProvider
from headrace_containers.provider import Limits, Spec

IMAGE = "python:3.11-slim"
TEST_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "containers" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture
def spec() -> Spec:
    """A small container."""
    return Spec(IMAGE, limits=Limits(memory_mib=256, processes=64, disk_mib=64))


@pytest.fixture(scope="module")
def docker(engine: None) -> Iterator[DockerProvider]:
    """The provider, of which nothing is left at its end."""
    provider = DockerProvider(DockerOptions(pull="never"))
    yield provider
    provider.close()
    wait_for(lambda: not containers_of(owner()), "containers to be removed")


@pytest.fixture
def broker(engine: None, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker in a process of its own, as a simulator starts it."""
    process = BrokerProcess(tmp_path)
    yield process
    process.close()
