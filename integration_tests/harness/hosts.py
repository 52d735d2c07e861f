"""Namespaces as hosts: each has an address on one network, which can be cut off, and shares no directory of the fleet
and no memory with the others. Their cables may be slow, and their addresses those of IPv6 alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.processes import ROOT, clean_environment
from harness.waiting import wait_for

BOOT_ID = "/proc/sys/kernel/random/boot_id"
NETWORK, NETWORK_6 = "10.231.47.", "fd00:231:47::"


@dataclass(frozen=True)
class Cable:
    """What each direction of a host's cable carries, and how long a packet is under way."""

    mbit: float = 1000.0
    delay_ms: float = 10.0


class Host:
    """A namespace with an address, in which `headrace` is run on a data directory of its own."""

    def __init__(
        self, prefix: str, name: str, number: int, folder: Path, others: Sequence[str], ipv6: bool = False
    ) -> None:
        self.name, self.address = name, f"{NETWORK_6 if ipv6 else NETWORK}{number}"
        self.data_dir = folder / name
        self.data_dir.mkdir(parents=True)
        self._hidden = ["/dev/shm", *(str(folder / other) for other in others)]
        self.namespace, self._switch, self._port = f"{prefix}-{name}", f"{prefix}-switch", f"to-{name}"
        self._slow = False
        self.switch: subprocess.Popen[str] | None = None
        """The slow switch that the cable leads to: `tell` speaks to it."""
        self.boot_id: Path | None = None
        """A file with what names the host's cores in place of the machine's: then they are its own."""
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")

    def plug_in(self) -> None:
        """A cable to the switch."""
        _ip(
            *("link", "add", "eth9", "netns", self.namespace, "type", "veth"),
            *("peer", "name", self._port, "netns", self._switch),
        )
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge")
        self._address_it()
        self.connect()

    def plug_in_slowly(self) -> None:
        """The cable that a slow switch has made."""
        self._slow = True
        self._address_it()

    def _address_it(self) -> None:
        length = ("/64", "nodad") if ":" in self.address else ("/24",)
        words = (f"{self.address}{length[0]}", "dev", "eth9", *length[1:])
        _ip("-n", self.namespace, "address", "add", *words)
        _ip("-n", self.namespace, "link", "set", "eth9", "up")

    def tell(self, fault: str, other: Host | None = None, *more: object) -> None:
        """A fault of what this host sends to another one, in the words of `slow_switch`; "mend" ends all."""
        assert self.switch is not None and self.switch.stdin is not None
        between = (self.address, other.address) if other is not None else ()
        print(fault, *between, *more, file=self.switch.stdin, flush=True)

    def sees(self, folder: Path) -> None:
        """The folder of another host, as of a shared file system."""
        self._hidden.remove(str(folder))

    def received_bytes(self) -> int:
        """What has come over its cable, headers too."""
        shown = _ip("-n", self.namespace, "-s", "-j", "link", "show", "eth9")
        (link,) = json.loads(shown)
        return int(link["stats64"]["rx"]["bytes"])

    def connect(self) -> None:
        """Plugs the host's cable in."""
        if not self._slow:
            _ip("-n", self._switch, "link", "set", self._port, "up")

    def cut_off(self) -> None:
        """Pulls the host's cable: nothing of it arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def command(self, *words: str) -> list[str]:
        """A command in the host's network, with its own /dev/shm and without the others' folders."""
        hide = "".join(f"mount -t tmpfs tmpfs {shlex.quote(path)} && " for path in self._hidden)
        if self.boot_id is not None:
            hide += f"mount --bind {shlex.quote(str(self.boot_id))} {BOOT_ID} && "
        inside = ("unshare", "--mount", "sh", "-c", hide + 'exec "$@"', "sh")
        return ["ip", "netns", "exec", self.namespace, *inside, *words]

    def headrace(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """`headrace …` on this host."""
        words = [sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(
            self.command(*words),
            env=clean_environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def json(self, *arguments: str) -> Any:
        """What `headrace … --json` prints on this host; fails the test unless it succeeds."""
        done = self.headrace(*arguments, "--json")
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return json.loads(done.stdout)

    def logs(self) -> str:
        """The ends of its logs."""
        files = sorted((self.data_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@contextmanager
def hosts(
    folder: Path, *names: str, cable: Cable | None = None, ipv6: bool = False, own_cores: bool = False
) -> Iterator[list[Host]]:
    """Hosts on one network; on leaving, their fleets are stopped and they are gone.

    `own_cores`: a core is another device on each.
    """
    prefix = f"headrace-{os.getpid()}"
    made: list[Host] = []
    slow = None
    _ip("netns", "add", f"{prefix}-switch")
    try:
        _ip("-n", f"{prefix}-switch", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{prefix}-switch", "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            others = [other for other in names if other != name]
            made.append(Host(prefix, name, number, folder, others, ipv6))
            if own_cores:
                made[-1].boot_id = folder / f"{name}.boot-id"
                made[-1].boot_id.write_text(name)
        if cable is not None:
            slow = _slow_switch(cable, made)
        for host in made:
            host.switch = slow
            host.plug_in() if slow is None else host.plug_in_slowly()
        yield made
    finally:
        for host in reversed(made):
            with suppress(subprocess.CalledProcessError):
                host.connect()
            host.headrace("down")
        if slow is not None and slow.stdin:
            slow.stdin.close()
            slow.wait(20)
        for name in (*names, "switch"):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", f"{prefix}-{name}")


def _slow_switch(cable: Cable, made: Sequence[Host]) -> subprocess.Popen[str]:
    ports = [f"{host.namespace}={host.address}" for host in made]
    command = [sys.executable, str(Path(__file__).with_name("slow_switch.py"))]
    switch = subprocess.Popen(
        [*command, str(cable.mbit), str(cable.delay_ms), *ports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert switch.stdout and switch.stdout.readline() == "ready\n", "the switch did not start"
    return switch


def can_make_hosts() -> bool:
    """Whether this machine lets us make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    try:
        _ip("netns", "add", "headrace-probe")
        _ip("netns", "delete", "headrace-probe")
    except subprocess.CalledProcessError:
        return False
    return True


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20, text=True)
    return done.stdout


def options(counts: dict[str, int]) -> list[str]:
    """All counts, which are 0 unless they are given."""
    every = {"rollout": 0, "trainer": 0, "reward": 0, "simulator": 0} | counts
    return [word for kind, count in every.items() for word in (f"--{kind}", str(count))]


def ready(head: Host, *names: str) -> dict[str, dict[str, Any]]:
    """The instances by name, once these and no others are ready."""

    def look() -> dict[str, dict[str, Any]] | None:
        listed = head.json("instances")["instances"]
        found = {item["name"]: item for item in listed if item["state"] == "READY"}
        return found if set(found) == set(names) else None

    return wait_for(look, f"{', '.join(names)}", 120)


def submit(head: Host, folder: Path, spec: dict[str, Any]) -> str:
    """The id of a run."""
    (folder / "run.yaml").write_text(yaml.safe_dump(spec))
    run: str = head.json("run", "submit", str(folder / "run.yaml"))["id"]
    return run


def at(head: Host, run: str, step: int, wait_s: float = 180.0) -> dict[str, Any]:
    """The run once it has committed a step."""

    def look() -> dict[str, Any] | None:
        now: dict[str, Any] = head.json("run", "get", run)
        assert now["state"] != "FAILED", now["reason"]
        return now if now["step"] >= step else None

    return wait_for(look, f"step {step}", wait_s)
