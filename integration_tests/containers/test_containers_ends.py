"""Whatever is killed, nothing is left: no container, no network, no volume."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from containers.brokers import BrokerProcess, containers_of
from harness.waiting import wait_for
from headrace_containers.client import Source
from headrace_containers.docker.engine import BUILT, OWNER, UNTIL, owner
from headrace_containers.docker.provider import DockerProvider
from headrace_containers.provider import (
    BadSpec,
    ContainerError,
    ContainerLost,
    EngineLost,
    Limits,
    Network,
    Spec,
)

CHILD = """
import sys, time
from pathlib import Path
from headrace_containers.client import Source
from headrace_containers.provider import Limits, Spec
source = Source("docker", {"pull": "never"}, 0, Path(sys.argv[1]))
container = source.start(Spec("python:3.11-slim", limits=Limits(memory_mib=128)))
print("started", flush=True)
container.exec(("sleep", "600"), timeout_s=600)
"""


def networks_and_volumes() -> set[str]:
    listed = (["docker", kind, "ls", "-q"] for kind in ("network", "volume"))
    found = [
        subprocess.run(each, capture_output=True, text=True, check=True, timeout=60).stdout for each in listed
    ]
    return {*"\n".join(found).split()}


def test_a_broker_that_is_killed_leaves_nothing(broker: BrokerProcess, spec: Spec) -> None:
    before = networks_and_volumes()
    source = broker.source(warm=1)
    busy = source.start(spec)
    proxied = source.start(replace(spec, network=Network(endpoint="127.0.0.1:9")))
    lost: list[ContainerError] = []

    def run() -> None:
        try:
            busy.exec(
                ("/bin/sh", "-c", "echo begun; sleep 600"), timeout_s=600, on_output=lambda *_: begun.set()
            )
        except ContainerError as error:
            lost.append(error)

    begun = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60) and len(broker.containers()) >= 3, "two, and the second one's relay"
    broker.kill()
    wait_for(lambda: not broker.containers(), "the engine to remove them")
    thread.join(60)
    assert [type(error) for error in lost] == [ContainerLost] and "broker" in str(lost[0])
    with pytest.raises(ContainerLost, match="broker"):
        proxied.exec(("ls",))
    with pytest.raises(EngineLost, match="broker"):
        source.start(spec)
    assert networks_and_volumes() == before


def test_a_child_that_is_killed_takes_its_container_along(broker: BrokerProcess) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(broker.folder)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "started\n"
    assert len(broker.containers()) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_for(lambda: not broker.containers(), "the broker to end it")
    assert broker.process.poll() is None


def test_a_container_that_its_engine_ends_is_lost_and_the_next_one_is_not(
    broker: BrokerProcess, spec: Spec
) -> None:
    source = broker.source()
    container = source.start(spec)
    subprocess.run(["docker", "kill", *broker.containers()], check=True, capture_output=True, timeout=60)
    with pytest.raises(ContainerLost):
        container.exec(("ls",))
    assert source.start(spec).exec(("echo", "anew")).stdout == b"anew\n"


def test_a_reaper_removes_what_owners_that_are_gone_have_left(docker: DockerProvider) -> None:
    """Such as where the engine itself was killed: those of processes that have ended, and those that are overdue."""
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    label = owner(gone.pid)
    elsewhere = "another-host:1/1/1"
    for name, until in (
        (label, time.time() + 1000),
        (elsewhere, time.time() - 1),
        (elsewhere + "2", time.time() + 1000),
    ):
        labels = ["--label", f"{OWNER}={name}", "--label", f"{UNTIL}={int(until)}"]
        run = ["docker", "create", "--network", "none", *labels, "python:3.11-slim", "sleep", "600"]
        subprocess.run(run, check=True, capture_output=True, timeout=120)
    try:
        docker.reap()
        assert containers_of(label), "its owner lives"
        assert not containers_of(elsewhere), "its time is over"
        gone.kill()
        gone.wait()
        docker.reap()
        assert not containers_of(label)
        assert containers_of(elsewhere + "2"), "nobody here knows whether its owner lives"
    finally:
        for left in containers_of(elsewhere + "2"):
            subprocess.run(["docker", "rm", "-f", left], check=True, capture_output=True, timeout=60)


def test_warm_containers_are_ready_and_their_time_begins_as_they_are_handed_over(
    broker: BrokerProcess, spec: Spec
) -> None:
    source = broker.source(warm=2)
    source.prepare(spec)
    wait_for(lambda: len(broker.containers()) == 2, "two to be ready")
    ready = {*broker.containers()}
    taken = source.start(replace(spec, env={"A": "mine"}))
    assert taken.id in ready and taken.exec(("/bin/sh", "-c", "echo $A")).stdout == b"mine\n"
    wait_for(lambda: len(broker.containers()) == 3, "another one to be made ready")
    other = source.start(replace(spec, limits=replace(spec.limits, memory_mib=128)))
    assert other.id not in ready, "another kind"


def test_too_many_wait_and_are_refused_by_name(engine: None, tmp_path: Path, spec: Spec) -> None:
    broker = BrokerProcess(
        tmp_path,
        HEADRACE_CONTAINERS_MOST="1",
        HEADRACE_CONTAINERS_PLACE_S="0.5",
        HEADRACE_CONTAINERS_MOST_MEMORY_MIB="300",
    )
    try:
        source = broker.source()
        first = source.start(spec)
        with pytest.raises(EngineLost, match="HEADRACE_CONTAINERS_MOST"):
            source.start(spec)
        first.close()
        source.start(spec).close()
        with pytest.raises(BadSpec) as caught:
            source.start(replace(spec, limits=Limits(memory_mib=301)))
        assert caught.value.key == "limits.memory_mib"
    finally:
        broker.close()


def test_an_engine_that_does_not_answer_is_named(
    engine_there: BrokerProcess, spec: Spec, tmp_path: Path
) -> None:
    broker = engine_there
    source = broker.source(host=f"unix://{tmp_path}/none.sock")
    with pytest.raises(EngineLost, match="does not answer"):
        source.start(spec)
    for options, key in (
        ({"hots": "x"}, "provider_options.hots"),
        ({"timeout_s": 0}, "provider_options.timeout_s"),
    ):
        with pytest.raises(BadSpec) as caught:
            Source("docker", options, 0, broker.folder).prepare(spec)
        assert caught.value.key == key
    with pytest.raises(BadSpec, match="HEADRACE_CONTAINERS_ENGINES"):
        broker.source(host="tcp://10.0.0.1:2375").prepare(spec)
    with pytest.raises(BadSpec, match="docker"):
        Source("doker", {}, 0, broker.folder).prepare(spec)


@pytest.fixture
def engine_there(engine: None, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose operator allows engines at two sockets of this test."""
    addresses = [f"unix://{tmp_path}/{name}.sock" for name in ("none", "engine")]
    process = BrokerProcess(tmp_path, HEADRACE_CONTAINERS_ENGINES=",".join(addresses))
    yield process
    process.close()


class Gateway:
    """A socket before the engine's own, which can go away and come back."""

    def __init__(self, path: Path) -> None:
        self._path, self._open = path, list[socket.socket]()
        self._answer = b""
        self.up()

    def up(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self._path))
        self._listening.listen(64)
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def down(self) -> None:
        """As an engine that was killed."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def say(self, answer: bytes) -> None:
        """From now on every request for a new container gets this answer."""
        self._answer = answer

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                engine.connect("/var/run/docker.sock")
                self._open += [client, engine]
                for source, target in ((client, engine), (engine, client)):
                    threading.Thread(target=self._carry, args=(source, target, client), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._answer and source is client and b"/containers/create" in data.partition(b"\r\n")[0]:
                    client.sendall(self._answer)
                    client.shutdown(socket.SHUT_WR)
                    while source.recv(1 << 16):
                        pass  # the request's body
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_an_engine_that_dies_costs_the_episodes_of_that_moment(
    engine_there: BrokerProcess, spec: Spec, tmp_path: Path
) -> None:
    broker = engine_there
    gateway = Gateway(tmp_path / "engine.sock")
    source = broker.source(host=f"unix://{tmp_path}/engine.sock")
    busy, idle = source.start(spec), source.start(spec)
    begun = threading.Event()
    lost: list[ContainerError] = []

    def run() -> None:
        try:
            busy.exec(
                ("/bin/sh", "-c", "echo begun; sleep 600"), timeout_s=600, on_output=lambda *_: begun.set()
            )
        except ContainerError as error:
            lost.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    gateway.down()
    thread.join(60)
    assert [type(error) for error in lost] == [EngineLost] and "does not answer" in str(lost[0])
    with pytest.raises(ContainerLost):
        idle.exec(("ls",))
    with pytest.raises(EngineLost, match="does not answer"):
        source.start(spec)
    gateway.up()
    assert source.start(spec).exec(("echo", "anew")).stdout == b"anew\n"

    told = b'{"message": "mkdir /var/lib/docker/overlay2/x: no space left on device"}'
    head = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
    gateway.say(head + b"Content-Length: %d\r\n\r\n" % len(told) + told)
    with pytest.raises(EngineLost, match="has no space left"):
        source.start(spec)
    gateway.say(b"")
    assert source.start(spec).exec(("echo", "room")).stdout == b"room\n"


def test_images_are_built_once_for_their_content_and_owned_folders_are_the_users(
    docker: DockerProvider, broker: BrokerProcess, tmp_path: Path, spec: Spec
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {spec.image}\nRUN mkdir /project && echo {os.getpid()} > /project/made\nWORKDIR /project\n"
    )
    built, before = replace(spec, image="", build=tmp_path, owned=("/project",)), built_images()
    begun = time.monotonic()
    docker.prepare(built)
    first = time.monotonic() - begun
    by_broker = broker.source().start(built)
    assert by_broker.exec(("cat", "made")).stdout == f"{os.getpid()}\n".encode(), (
        "which reads no folder itself"
    )
    by_broker.close()
    container = docker.start(built)
    assert container.exec(("cat", "made")).stdout == f"{os.getpid()}\n".encode()
    assert container.exec(("/bin/sh", "-c", "echo mine > made && cat made")).stdout == b"mine\n"
    container.close()
    again = DockerProvider(docker._engine.options)
    begun = time.monotonic()
    again.prepare(built)
    assert time.monotonic() - begun < first, "found by its content"
    again.close()
    subprocess.run(["docker", "rmi", "-f", *(built_images() - before)], capture_output=True, timeout=60)
    (tmp_path / "Dockerfile").write_text(f"FROM {spec.image}\nRUN echo broken >&2; exit 3\n")
    # What was changed is made anew.
    with pytest.raises(BadSpec) as caught:
        docker.prepare(built)
    assert caught.value.key == "build" and "3" in caught.value.message
    for wrong, key in (
        (replace(built, build=tmp_path / "none"), "build"),
        (replace(built, image="x"), "image"),
    ):
        with pytest.raises(BadSpec) as caught:
            docker.prepare(wrong)
        assert caught.value.key == key


def built_images() -> set[str]:
    listed = ["docker", "images", "-q", "--filter", f"label={BUILT}"]
    return {*subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60).stdout.split()}
