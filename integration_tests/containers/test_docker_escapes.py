"""What a hostile program in a container tries, and what comes of it: the table of docs/container-environments.md."""

from __future__ import annotations

import io
import os
import re
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.processes import ROOT
from headrace_containers.docker.provider import DockerProvider
from headrace_containers.files import save, unpacked
from headrace_containers.provider import BadPath, Container, ContainerLost, File, Limits, Network, Spec

# Each ends with exit code 0 where it got out. Root of a container is tried beside its user: an image may need it.
TRIED = {
    "mount a host's device": "mount /dev/vda /mnt || mount /dev/sda /mnt",
    "mount a tmpfs": "mount -t tmpfs none /mnt",
    "mount in a user name space": "unshare -Urm mount -t tmpfs none /mnt",
    "remount /proc/sys": "mount -o remount,rw /proc/sys",
    "make a device node": "mknod disk b 254 0 && head -c 1 disk",
    "read the kernel's memory": "head -c 1 /proc/kcore | grep -q . || head -c 1 /dev/mem | grep -q .",
    "read the host's disk": "cat /dev/vda | head -c 1 | grep -q . || cat /dev/sda | head -c 1 | grep -q .",
    "load a module": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(175, 0, 0, b\"\") != 0)'",
    "keyring of the kernel": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, -3, 0) < 0)'",
    "trace the first process": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)'",
    "environment of the first process": "tr '\\0' '\\n' < /proc/1/environ | grep -q .",
    "root of the first process": "ls /proc/1/root/",
    "kill the first process's child": "kill -9 $(cat /proc/1/task/1/children)",
    "core pattern": "echo '|/bin/x' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo b > /proc/sysrq-trigger",
    "release agent of cgroups": "mount -t cgroup -o rdma cgroup /mnt",
    "raise its own limits": "cd /sys/fs/cgroup; f=pids.max; [ -e pids/$f ] && f=pids/$f; [ -e $f ] && echo max > $f",
    "set the clock": "date -s 2001-01-01",
    "set the host name": "hostname other",
    "change the root": "chroot /proc/1/root true",
    "be root by a setuid program": "su -c true",
    "be root by a copy": "cp /bin/sh s; chmod u+s s; [ `./s -pc 'id -u'` -lt `id -u` ]",
    "the engine's socket": "ls /var/run/docker.sock || ls /run/docker.sock || ls /run/containerd/containerd.sock",
    "a network device": "grep -v -e lo: -e '|' /proc/net/dev",
    "a host by address": "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 3)'",
    "the cloud's metadata": "python3 -c 'import socket; socket.create_connection((\"169.254.169.254\", 80), 3)'",
    "a name": "python3 -c 'import socket; socket.getaddrinfo(\"example.com\", 80)'",
    "a raw socket": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "a packet socket": "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)'",
    "an abstract socket of the host": "grep -q @ /proc/net/unix",
    "a process of the host": "[ $(ls -d /proc/[0-9]* | wc -l) -gt 20 ]",
    "a file of the host": "ls {checkout} || cat {secret}",
}
NO_ROOTS = {"be root by a setuid program", "be root by a copy", "kill the first process's child"}
"""Tried as a user alone: root is root of its container already, and may end it."""


@pytest.fixture(scope="module")
def spec() -> Spec:
    return Spec("python:3.11-slim", limits=Limits(memory_mib=256, processes=64, disk_mib=64))


@pytest.fixture(scope="module", params=["user", "root"])
def inside(
    request: pytest.FixtureRequest, docker: DockerProvider, spec: Spec
) -> Iterator[tuple[str, Container]]:
    user = str(request.param)
    container = docker.start(spec if user == "user" else replace(spec, user="root"))
    yield user, container
    container.close()


@pytest.mark.parametrize("what", TRIED)
def test_it_does_not_get_out(inside: tuple[str, Container], what: str, tmp_path: Path) -> None:
    user, container = inside
    if user == "root" and what in NO_ROOTS:
        pytest.skip("root is that already")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    script = TRIED[what].replace("{checkout}", str(ROOT)).replace("{secret}", str(secret))
    ran = container.exec(("/bin/sh", "-c", script), timeout_s=30.0)
    assert ran.exit_code != 0, (what, ran.stdout, ran.stderr)
    assert container.exec(("echo", "lives")).stdout == b"lives\n"


def test_it_has_no_capability_no_new_privileges_and_a_filter(docker: DockerProvider, spec: Spec) -> None:
    roots = sum(1 << bit for bit in (0, 1, 3, 5, 6, 7))  # CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID
    for user, most in (("1000:1000", 0), ("root", roots)):
        container = docker.start(replace(spec, user=user))
        status = container.exec(("cat", "/proc/self/status")).stdout.decode()
        found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(found["CapBnd"], 16) & ~most == 0, found
        assert (int(found["CapEff"], 16) == 0) == (user != "root")
        assert found["NoNewPrivs"] == "1" and found["Seccomp"] == "2"
        other = container.exec(("grep", "-E", "CapEff|CapPrm|CapAmb", "/proc/self/status"), user="1000:1000")
        assert {int(line.split()[1], 16) for line in other.stdout.splitlines()} == {0}, "beside root too"
        container.close()


def test_nothing_of_the_host_is_mounted(docker: DockerProvider, spec: Spec) -> None:
    container = docker.start(spec)
    mounts = [
        line.split() for line in container.exec(("cat", "/proc/self/mounts")).stdout.decode().splitlines()
    ]
    assert {kind for _, _, kind, *_ in mounts} <= {
        *(
            "overlay",
            "proc",
            "tmpfs",
            "devpts",
            "sysfs",
            "cgroup",
            "cgroup2",
            "mqueue",
            "ext4",
            "xfs",
            "btrfs",
        )
    }
    # The engine's first process, and three files that name the container itself, are all that comes from outside.
    outside = {path for device, path, *_ in mounts if device.startswith("/dev/")}
    assert {path for path in outside if not path.endswith("/docker-init")} <= {
        *("/etc/resolv.conf", "/etc/hostname", "/etc/hosts")
    }
    devices = container.exec(("ls", "/dev")).stdout.decode().split()
    assert {*devices} <= {
        *(
            "core",
            "fd",
            "full",
            "mqueue",
            "null",
            "ptmx",
            "pts",
            "random",
            "shm",
            "stderr",
            "stdin",
            "stdout",
        ),
        *("tty", "urandom", "zero", "console"),
    }
    container.close()


def test_a_fork_bomb_ends_with_its_command(docker: DockerProvider, spec: Spec) -> None:
    """Its processes are counted; a command that cannot be killed costs its container, and no other."""
    other, container = (
        docker.start(spec),
        docker.start(replace(spec, limits=replace(spec.limits, processes=40))),
    )
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    begun = time.monotonic()
    try:
        ran = container.exec(("python3", "-c", bomb), timeout_s=2.0)
        assert ran.ended == "time"
    except ContainerLost as lost:
        assert "killed" in str(lost) or "ended" in str(lost)
    assert time.monotonic() - begun < 60
    assert other.exec(("echo", "lives")).stdout == b"lives\n"
    container.close()
    other.close()


def test_a_full_memory_kills_its_process_alone(docker: DockerProvider, spec: Spec) -> None:
    container = docker.start(replace(spec, limits=replace(spec.limits, memory_mib=64)))
    assert container.exec(("python3", "-c", "x = bytearray(1 << 30)")).exit_code in (1, 137)
    assert container.exec(("echo", "lives")).stdout == b"lives\n"
    container.close()


def test_a_full_disk_ends_its_container_by_name(docker: DockerProvider, spec: Spec) -> None:
    other, container = (
        docker.start(spec),
        docker.start(replace(spec, limits=replace(spec.limits, disk_mib=32))),
    )
    one = container.exec(("/bin/sh", "-c", "head -c 100000000 /dev/zero > one; ls -l one"))
    assert int(one.stdout.split()[4]) <= 32 << 20, "no file is larger than all may be"
    with pytest.raises(ContainerLost, match=r"limits\.disk_mib"):
        container.exec(
            (
                "/bin/sh",
                "-c",
                "i=0; while [ $i -lt 500 ]; do head -c 1000000 /dev/zero > f$i; i=$((i+1)); sleep 0.02; done",
            ),
            timeout_s=60.0,
        )
        container.exec(("sleep", "30"))
    assert other.exec(("echo", "lives")).stdout == b"lives\n"
    other.close()


def test_flooding_output_ends_the_command(docker: DockerProvider, spec: Spec) -> None:
    container = docker.start(spec)
    ran = container.exec(("/bin/sh", "-c", "exec cat /dev/zero"), timeout_s=60.0, most_bytes=1000)
    assert ran.ended == "output" and len(ran.stdout) == 1000
    container.close()


def test_hostile_archives_write_nothing_anywhere(tmp_path: Path) -> None:
    """What comes out of a container is read entry by entry; nothing is unpacked."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind, link in (
            ("d/../../evil", tarfile.REGTYPE, ""),
            ("d/link", tarfile.SYMTYPE, "/etc"),
            ("d/hard", tarfile.LNKTYPE, "/etc/passwd"),
            ("d/device", tarfile.CHRTYPE, ""),
            ("/absolute", tarfile.REGTYPE, ""),
            ("d/fine", tarfile.REGTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"x"))
    found = [(entry.name, entry.isreg()) for entry, _ in unpacked([packed.getvalue()], 1000, "d")]
    assert [name for name, regular in found if regular] == ["d/../../evil", "/absolute", "d/fine"]
    for path in ("../evil", "/absolute", "a/../../evil", "a//b", "a\0b"):
        with pytest.raises(BadPath):
            save([File(path, b"x")], tmp_path / f"out{len(path)}{os.urandom(2).hex()}")
    with pytest.raises(BadPath, match="larger"):
        list(unpacked([packed.getvalue()], 2, "d"))
    save([File("a/b", b"x")], tmp_path / "good")
    assert (tmp_path / "good" / "a" / "b").read_bytes() == b"x"


@pytest.fixture
def listening() -> Iterator[int]:
    """A server of this host that says hello."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


def test_a_network_is_its_list_and_nothing_else(docker: DockerProvider, spec: Spec, listening: int) -> None:
    allowed, other = f"127.0.0.1:{listening}", socket.create_server(("127.0.0.1", 0))
    container = docker.start(replace(spec, network=Network(allow=(allowed, "localhost:1"), endpoint=allowed)))
    asks = (
        "import http.client, sys\n"
        "c = http.client.HTTPConnection('127.0.0.1', 3128, timeout=20)\n"
        "c.request('GET', sys.argv[1])\n"
        "r = c.getresponse()\n"
        "print(r.status, r.read().decode())\n"
    )

    def by_proxy(url: str) -> str:
        return container.exec(("python3", "-c", asks, url)).stdout.decode().strip()

    assert by_proxy(f"http://{allowed}/") == "200 hello"
    refused = f"127.0.0.1:{other.getsockname()[1]}"
    assert by_proxy(f"http://{refused}/") == f"403 headrace: {refused} is not in network.allow"
    assert "not in network.allow" in by_proxy("http://169.254.169.254/latest/")
    assert "which is no public address" in by_proxy("http://localhost:1/"), (
        "a name leads into no network of the host's"
    )
    direct = (
        "import urllib.request as u\n"
        "print(u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:3129/', timeout=20).read())"
    )
    assert container.exec(("python3", "-c", direct)).stdout == b"b'hello'\n"
    straight = f"import socket; socket.create_connection(('127.0.0.1', {listening}), 3)"
    assert container.exec(("python3", "-c", straight)).exit_code != 0, (
        "the loopback device is the container's own"
    )
    devices = container.exec(("cat", "/proc/net/dev")).stdout.decode()
    assert re.findall(r"^\s*(\w+):", devices, re.MULTILINE) == ["lo"]
    container.close()
    other.close()
