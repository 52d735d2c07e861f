"""An S3 server for the session, a proxy before it and an empty bucket for each test."""

from __future__ import annotations

import uuid

import pytest
from harness.object_store import FaultProxy, always, environment_of, make_bucket, s3_server


@pytest.fixture(scope="session")
def server():
    """Address of an S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture(scope="session")
def _proxy(server):
    with FaultProxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy, monkeypatch, tmp_path):
    """A proxy before the server, which this process and those that it starts use."""
    for name, value in environment_of(_proxy.address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_STORE_CACHE", str(tmp_path / "cache"))
    _proxy.fault = always("")
    _proxy.seen.clear()
    _proxy.broken.clear()
    return _proxy


@pytest.fixture
def bucket(server):
    """Address of an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    make_bucket(server, name)
    return f"s3://{name}"
