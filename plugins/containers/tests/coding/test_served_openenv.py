"""Servers of OpenEnv in containers of namespaces, whose endpoint is carried as a relay does."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
import threading
from pathlib import Path

import pytest
from headrace_containers.openenv import Served, ServedOptions
from headrace_containers.provider import ENDPOINT_PORT, File, Spec
from headrace_environments.servers import ServerLost
from headrace_simulator.backends.base import BackendError

SERVER = Path(__file__).resolve().parents[4] / "integration_tests/containers/openenv_server.py"
SITE = "/opt/site"
_NEW_NETWORK = 0x40000000


def listening_in(init: int) -> socket.socket:
    """A socket at the endpoint's port in the network name space of a container."""
    made = list[socket.socket]()

    def listen() -> None:  # the name space is this thread's alone
        with open(f"/proc/{init}/ns/net") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEW_NETWORK) == 0
        made.append(socket.create_server(("127.0.0.1", ENDPOINT_PORT)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return made[0]


def carry(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()


def relay(listening: socket.socket, endpoint: str) -> None:
    host, _, port = endpoint.partition(":")
    while True:
        inside, _ = listening.accept()
        outside = socket.create_connection((host, int(port)))
        for pair in ((inside, outside), (outside, inside)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


@pytest.fixture
def served(start):
    """Starts containers in which the server and what it imports lie."""
    found = importlib.util.find_spec("websockets")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    files = [
        File(f"{SITE}/websockets/{path.relative_to(package)}", path.read_bytes())
        for path in package.rglob("*.py")
    ]
    started = []

    def begin(spec: Spec):
        container = start(spec)
        container.write([*files, File(f"{SITE}/server.py", SERVER.read_bytes())], user="root")
        arguments = (listening_in(container._init), spec.network.endpoint)
        threading.Thread(target=relay, args=arguments, daemon=True).start()
        started.append(container)
        return container

    return begin, started


def options(*command: str, **more: object) -> ServedOptions:
    given = {"image": "guess:latest", "command": command, "env": {"PYTHONPATH": SITE}, "user": "1000:1000"}
    return ServedOptions.model_validate(given | more)


def test_a_server_is_reached_from_inside_its_container_and_started_again_when_it_is_lost(served):
    begin, started = served
    made = Served(options("python3", f"{SITE}/server.py", "8000", reset={"right": "1"}), begin)
    for _ in range(2):
        messages, _ = made.reset(0, {})
        assert [each["content"] for each in messages] == ["?"]
    ((message,), reward, done) = made.step({"content": "long"})
    assert (len(message["content"]), reward, done) == (400_002, 0.0, False)
    assert made.step({"content": "1"}) == ([], 1.0, True)
    assert len(started) == 1
    with pytest.raises(ServerLost, match="guess:latest is gone"):
        made.step({"content": "exit"})
    made.reset(1, {})
    assert made.step({"content": "1"}) == ([], 1.0, True)
    assert len(started) == 2 and started[0]._process.poll() is not None, "the first one has ended"


def test_a_server_that_does_not_answer_is_told_with_what_it_printed(served):
    begin, started = served
    with pytest.raises(BackendError, match=r"(?s)its server has ended.*no game.*exit code 3") as caught:
        Served(options("sh", "-c", "echo no game; exit 3"), begin)
    assert caught.value.field == "options_json.image"
    with pytest.raises(
        BackendError, match=r"no server answers at its port 8000 within 1 s.*it printed nothing"
    ):
        Served(options("sleep", "100", start_s=1.0), begin)
    with pytest.raises(BackendError, match="give its `command`") as caught:
        Served(options(), begin)
    assert caught.value.field == "options_json.command"
    assert all(each._process.poll() is not None for each in started), "none is left"
