"""Strangers who flood every port of a fleet that may have 1,024 descriptors: a run ends well, and charges nobody."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from harness.fleet import Fleet
from headrace_servicekit.rpc.addresses import split_address

DESCRIPTORS = 1024
IDLE, CALLS = 500, 300
MOST_LOG_BYTES = 1 << 20
SAID = [
    b"",
    b"PRI * HTTP/2.0\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"GET /v1/runs HTTP/1.1\r\n",
]


class FewDescriptors(Fleet):
    """A fleet whose processes may not raise their limit."""

    def command(self, *arguments):
        return ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *super().command(*arguments)]


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """The attacker's own descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Flood:
    """Connections and calls without a token, made again whenever they are ended."""

    def __init__(self, addresses: list[str], grpc_addresses: list[str]) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._idle, args=(each,)) for each in addresses]
        self._threads += [threading.Thread(target=self._calls, args=(each,)) for each in grpc_addresses]
        self.opened = 0

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _idle(self, address: str) -> None:
        host, port = split_address(address)
        held: list[socket.socket] = []
        while not self._over.wait(0.5):
            held = [each for each in held if _open(each)]
            while len(held) < IDLE and not self._over.is_set():
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((host, int(port)), 1))
                    held[-1].sendall(SAID[len(held) % len(SAID)])
                    held[-1].setblocking(False)
                    self.opened += 1
        for each in held:
            each.close()

    def _calls(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        while not self._over.is_set():
            with grpc.insecure_channel(address, options=options) as channel:
                watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
                check = channel.stream_unary("/grpc.health.v1.Health/Check")
                calls = [watch(b"", timeout=10) for _ in range(CALLS)]
                calls += [check.future(self._silence(), timeout=10) for _ in range(16)]
                self._over.wait(2.0)
                for call in calls:
                    call.cancel()

    def _silence(self) -> Iterator[bytes]:
        self._over.wait(5.0)
        yield from ()


def _open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def test_strangers_cost_a_run_nothing(tmp_path, spec_of):
    with FewDescriptors(tmp_path / "data", "--simulator", "0") as fleet:
        fleet.ready("rollout-0", "trainer-0", "reward-0")
        services = [_coordinator(fleet), *(each.address for each in fleet.client.instances())]
        with Flood([*services, f"127.0.0.1:{fleet.port}"], services) as flood:
            time.sleep(3)  # the flood is there before the run
            run = fleet.succeed(fleet.submit(spec_of(steps=3)), 120)
            assert flood.opened > DESCRIPTORS
        assert run.recoveries == 0, [event.data for event in fleet.events(run)]
        for log in (fleet.data_dir / "logs").glob("*.log"):
            assert log.stat().st_size < MOST_LOG_BYTES, f"{log.name}: {log.read_text()[-2000:]}"


def _coordinator(fleet: Fleet) -> str:
    return f"127.0.0.1:{fleet.client.require_health().grpc_port}"
