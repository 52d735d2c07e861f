"""A machine of this machine: what a service would run, in namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace_containers.provider import ContainerLost, Spec
from headrace_containers.remote.adapter import Machine
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "coding"))
from namespaces import Namespace, missing

__all__ = ["Local", "missing"]


class Local(Machine):
    """Runs scripts in namespaces of this machine, as a service would: as root, without input, text out."""

    def __init__(self, spec: Spec) -> None:
        self._held = Namespace(spec)
        self.id, self.calls, self.longest = self._held.id, 0, 0

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        if self._held._process.poll() is not None:
            raise ContainerLost("the service has no such container")
        self.calls, self.longest = self.calls + 1, max(self.longest, len(script))
        enter = ("nsenter", "-t", str(self._held._init), "-m", "-p", "-n", "-i", "-u", "--root", "--wd")
        given = ("env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SECRET=of-the-service")
        ran = subprocess.run(
            [*enter, *given, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
        if ran.returncode < 0:
            raise ContainerLost("the service has no such container")
        return ran.returncode, ran.stdout.decode("ascii")

    @override
    def end(self) -> None:
        self._held.close()
