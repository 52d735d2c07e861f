"""Namespaces as hosts: each has an address on one network, which can be cut off, and shares no directory of the fleet
and no memory with the others.
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
from pathlib import Path
from typing import Any

from harness.processes import ROOT, clean_environment

NETWORK = "10.231.47"


class Host:
    """A namespace with an address, in which `headrace` is run on a data directory of its own."""

    def __init__(self, prefix: str, name: str, number: int, folder: Path, others: Sequence[str]) -> None:
        self.name, self.address, self.data_dir = name, f"{NETWORK}.{number}", folder / name
        self.data_dir.mkdir(parents=True)
        self._hidden = ["/dev/shm", *(str(folder / other) for other in others)]
        self._namespace, self._switch, self._port = f"{prefix}-{name}", f"{prefix}-switch", f"to-{name}"
        _ip("netns", "add", self._namespace)
        _ip(
            *("link", "add", "eth9", "netns", self._namespace, "type", "veth"),
            *("peer", "name", self._port, "netns", self._switch),
        )
        _ip("-n", self._namespace, "address", "add", f"{self.address}/24", "dev", "eth9")
        for device in ("lo", "eth9"):
            _ip("-n", self._namespace, "link", "set", device, "up")
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge")
        self.connect()

    def connect(self) -> None:
        """Plugs the host's cable in."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def cut_off(self) -> None:
        """Pulls the host's cable: nothing of it arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def headrace(self, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """`headrace …` on this host."""
        hide = "".join(f"mount -t tmpfs tmpfs {shlex.quote(path)} && " for path in self._hidden)
        inside = [
            "ip",
            "netns",
            "exec",
            self._namespace,
            "unshare",
            "--mount",
            "sh",
            "-c",
            hide + 'exec "$@"',
            "sh",
        ]
        return subprocess.run(
            [*inside, sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(self.data_dir)],
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
def hosts(folder: Path, *names: str) -> Iterator[list[Host]]:
    """Hosts on one network; on leaving, their fleets are stopped and they are gone."""
    prefix = f"headrace-{os.getpid()}"
    made: list[Host] = []
    _ip("netns", "add", f"{prefix}-switch")
    try:
        _ip("-n", f"{prefix}-switch", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{prefix}-switch", "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            made.append(Host(prefix, name, number, folder, [other for other in names if other != name]))
        yield made
    finally:
        for host in reversed(made):
            host.connect()
            host.headrace("down")
        for name in (*names, "switch"):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", f"{prefix}-{name}")


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


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
