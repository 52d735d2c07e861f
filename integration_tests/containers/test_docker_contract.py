"""Docker's containers do what all containers must, asked directly and through a broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from containers.brokers import BrokerProcess
from headrace_containers.client import Source
from headrace_containers.contract import ProviderContract
from headrace_containers.docker.provider import DockerProvider


class TestDocker(ProviderContract):
    @pytest.fixture
    def provider(self, docker: DockerProvider) -> DockerProvider:
        return docker


class TestBroker(ProviderContract):
    @pytest.fixture(scope="class")
    def provider(self, engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
        process = BrokerProcess(tmp_path_factory.mktemp("b"))
        yield process.source(warm=1)
        process.close()
