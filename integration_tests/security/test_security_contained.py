"""Users' code of a contained fleet opens sockets, forks without end, takes all memory and reads what is not its own.

The code is a worker's, as scorers, environments and agents are.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from headrace_servicekit.contained import settings
from headrace_servicekit.contained.groups import Groups
from headrace_servicekit.contained.network import ENDPOINT_PORT, PROXY_PORT
from headrace_servicekit.contained.settings import ContainedSettings, Containment, NotContained
from headrace_servicekit.process.worker import (
    UsersCode,
    Worker,
    WorkerGone,
    contain_workers,
    hide_from_workers,
)
from headrace_servicekit.process.worker_pipes import JSON_CODEC

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and cgroups are Linux'")
MIB = 1 << 20
NORMAL = 12345
BOUNDS = {"processes": 40, "memory_bytes": 256 * MIB, "cores": 0.5, "file_bytes": 32 * MIB}
CODE = """
import os, socket, time, urllib.request
from headrace_servicekit.process.worker_pipes import become_worker, decode_json, encode_json, frame, read_frame
reader, writer = become_worker()
asked = decode_json(read_frame(reader))

def say(found):
    writer.write(frame(encode_json(found)))
    writer.flush()

def connect(host, port, text="GET /there HTTP/1.1\\r\\n\\r\\n"):
    with socket.create_connection((host, port), timeout=10) as each:
        each.sendall(text.encode())
        return each.recv(4096).decode()

def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()

def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        return each.sendto(b"x", ("192.0.2.1", 53))

def abstract():
    with socket.socket(socket.AF_UNIX) as each:
        return each.connect("\\0" + asked["abstract"])

REACHED = {
    "loopback of the host": lambda: connect("127.0.0.1", asked["port"]),
    "beyond": lambda: connect("192.0.2.1", 80),
    "datagram": datagram,
    "abstract socket": abstract,
    "token": lambda: open(asked["data"] + "/token").read(),
    "another run": lambda: os.listdir(asked["data"] + "/runs/other"),
    "a file of another run": lambda: open(asked["data"] + "/runs/other/checkpoint").read(),
    "sockets of the service": lambda: os.listdir(f"/proc/{os.getppid()}/fd"),
    "cgroups": lambda: open("/sys/fs/cgroup/cgroup.procs", "w").write("0"),
    "not listed": lambda: connect("127.0.0.1", asked["proxy"], "CONNECT 127.0.0.1:9 HTTP/1.1\\r\\n\\r\\n"),
    "listed": lambda: get(f"http://127.0.0.2:{asked['listed']}/listed"),
    "endpoint": lambda: connect("127.0.0.1", asked["endpoint"]),
    "homes": lambda: os.listdir(os.path.dirname(os.environ["HOME"])),
    "interfaces": lambda: [name for _, name in socket.if_nameindex()],
}

def tried(do):
    try:
        return do()
    except OSError as error:
        return f"refused: {error}"

def forks():
    for made in range(10_000):
        try:
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
        except OSError:
            return made

def memory():
    kept = [b"x" * (1 << 24) for _ in range(64)]
    return len(kept)

def files():
    written, errors = 0, []
    for folder in (os.environ["HOME"], "/tmp", "/var/tmp", "/dev/shm"):
        try:
            with open(folder + "/headrace-fills", "wb", buffering=0) as file:
                for _ in range(64):
                    written += file.write(b"x" * (1 << 20))
        except OSError as error:
            errors.append(error.errno)
    return {"written": written, "errors": errors, "seen": os.listdir("/tmp")}

def spin():
    for _ in range(3):
        if os.fork() == 0:
            while True:
                pass

if asked["what"] == "reach":
    say({name: tried(do) for name, do in REACHED.items()})
else:
    say({"found": {"forks": forks, "memory": memory, "spin": spin, "files": files}[asked["what"]]()})
time.sleep(600)
"""


async def http(reader, writer):
    target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(target) + target)
    await writer.drain()
    writer.close()


class Contained:
    """A worker of a contained service with a data directory; with `listed`, an admin lists a server that answers."""

    def __init__(self, folder: Path, *, listed: bool = False) -> None:
        self._folder, self._listed = folder, listed

    async def __aenter__(self) -> Contained:
        data, code = self._folder / "data", self._folder / "code"
        for name in ("token", "runs/other/checkpoint"):
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_text("secret")
        code.mkdir()
        (code / "contained_code.py").write_text(CODE)
        self._server = await asyncio.start_server(http, ["127.0.0.1", "127.0.0.2"], 0)
        self.ports = {each.getsockname()[0]: each.getsockname()[1] for each in self._server.sockets}
        self._abstract = socket.socket(socket.AF_UNIX)
        self._abstract.bind(f"\0headrace-test-{os.getpid()}")
        self._abstract.listen()
        reach = f"127.0.0.2:{self.ports['127.0.0.2']}"
        os.environ["PYTHONPATH"] = str(code)
        hide_from_workers(data / "token", data)
        self.walls = Containment(ContainedSettings(**BOUNDS, reach=reach if self._listed else ""))
        contain_workers(self.walls)
        self.worker = await Worker.start("contained_code", JSON_CODEC, code=UsersCode(str(code), code))
        self._other = await Worker.start("contained_code", JSON_CODEC, code=UsersCode(str(code), code))
        return self

    async def asked(self, what: str) -> dict:
        """What the code found."""
        own, listed = (self.ports[host] for host in ("127.0.0.1", "127.0.0.2"))
        places = {"port": own, "listed": listed, "proxy": PROXY_PORT, "endpoint": ENDPOINT_PORT}
        names = {"data": str(self._folder / "data"), "abstract": f"headrace-test-{os.getpid()}"}
        self.worker.send({"what": what, **places, **names})
        return await self.worker.receive(60.0)

    async def __aexit__(self, *_: object) -> None:
        await self.worker.kill()
        await self._other.kill()
        if self.walls.groups:
            self.walls.groups.close()
        hide_from_workers()
        contain_workers(None)
        del os.environ["PYTHONPATH"]
        self._abstract.close()
        self._server.close()


def refused(found: dict) -> set[str]:
    return {name for name, value in found.items() if str(value).startswith("refused")}


OUT_OF_REACH = {
    *("loopback of the host", "beyond", "datagram", "abstract socket", "token", "another run"),
    *("a file of another run", "sockets of the service", "cgroups"),
}


async def test_code_reaches_nothing_by_itself(tmp_path):
    async with Contained(tmp_path) as contained:
        found = await contained.asked("reach")
    assert refused(found) - {"endpoint"} == OUT_OF_REACH | {"listed"}, found
    assert found["interfaces"] == ["lo"] and "/there" not in found["endpoint"]
    assert len(found["homes"]) == 1, "homes of other runs' workers"
    assert "is not in HEADRACE_CONTAINED_REACH" in found["not listed"]


async def test_its_endpoint_and_a_listed_host_answer(tmp_path):
    async with Contained(tmp_path, listed=True) as contained:
        assert contained.worker.outlet is not None
        contained.worker.outlet.endpoint = ("127.0.0.1", contained.ports["127.0.0.1"])
        found = await contained.asked("reach")
    assert refused(found) == OUT_OF_REACH, found
    assert found["listed"] == "/listed" and found["endpoint"].endswith("/there")


async def test_ten_thousand_processes_are_forty_and_end_with_the_worker(tmp_path):
    async with Contained(tmp_path) as contained:
        found = await contained.asked("forks")
        assert 20 < found["found"] < BOUNDS["processes"]
        started = psutil.Process(contained.worker.process.pid).children(recursive=True)
        assert len(started) == found["found"]
    assert not [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_all_memory_is_its_own(tmp_path):
    """With a cgroup its processes are killed; by limits of each process it gets an error and dies of it."""
    async with Contained(tmp_path) as contained:
        with pytest.raises(WorkerGone):
            await contained.asked("memory")


async def test_its_files_are_bounded_and_its_own_wherever_every_user_writes(tmp_path):
    async with Contained(tmp_path) as contained:
        found = (await contained.asked("files"))["found"]
    assert found["errors"] == [errno.ENOSPC] * 4, found
    assert 0 < found["written"] <= BOUNDS["file_bytes"]
    assert "headrace-fills" in found["seen"]
    outside = {name for each in ("/tmp", "/var/tmp", "/dev/shm") for name in os.listdir(each)}
    assert "headrace-fills" not in outside


async def test_without_a_cgroup_each_process_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(Groups, "find", classmethod(lambda cls: None))
    async with Contained(tmp_path / "forks") as contained:
        assert "limits of each process (no cgroup)" in contained.walls.walls[1]
        assert (await contained.asked("forks"))["found"] < BOUNDS["processes"]
    async with Contained(tmp_path / "memory") as contained:
        with pytest.raises(WorkerGone):
            await contained.asked("memory")


@pytest.mark.nightly  # quick: test_kit_contained.py has the quota's file
async def test_cores_are_bounded_by_the_cgroup(tmp_path):
    async with Contained(tmp_path) as contained:
        if not contained.walls.groups or "cpu" not in contained.walls.groups.controllers:
            pytest.skip("no cgroup of this machine bounds cores")
        await contained.asked("spin")
        seen = {each.pid: each for each in psutil.Process(contained.worker.process.pid).children()}.values()
        began = time.monotonic()
        before = sum(sum(each.cpu_times()[:2]) for each in seen)
        await asyncio.sleep(2.0)
        used = (sum(sum(each.cpu_times()[:2]) for each in seen) - before) / (time.monotonic() - began)
    assert len(seen) == 3 and used < BOUNDS["cores"] * 1.5


def test_a_machine_without_namespaces_does_not_start_contained_unless_told(monkeypatch):
    monkeypatch.setattr(settings, "may_have_networks", lambda: False)
    with pytest.raises(NotContained, match="HEADRACE_CONTAINED_NETWORK=best_effort"):
        Containment(ContainedSettings())
    walls = Containment(ContainedSettings(network="best_effort")).walls
    assert walls[0].startswith("THE HOST'S NETWORK")


def test_a_normal_users_code_has_no_network_either(tmp_path):
    """The service is no root: its code is behind a namespace of users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        here = os.path.dirname(__file__)
        program = (
            f"import asyncio, json, sys; sys.path.insert(0, {here!r})\n"
            "from pathlib import Path\nfrom test_security_contained import Contained\n"
            "async def main():\n"
            f"    async with Contained(Path({folder!r})) as its: print(json.dumps(await its.asked('reach')))\n"
            "asyncio.run(main())"
        )
        command = [sys.executable, "-c", program]
        if os.getuid() == 0:
            os.chown(folder, NORMAL, NORMAL)
            script = Path(__file__).with_name("as_normal_user.sh")
            command = ["sh", str(script), str(NORMAL), os.path.realpath(sys.base_prefix), folder, *command]
        environment = {**os.environ, "HOME": folder, "CAPABILITIES": ""}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if "unshare failed" in done.stderr or "no network of its own here" in done.stderr:
        pytest.skip("this machine allows users no namespaces")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert refused(found) >= OUT_OF_REACH - {"sockets of the service"} | {"listed"}, found
    assert found["interfaces"] == ["lo"]
