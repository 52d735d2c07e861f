"""A broker in a process of its own, and what it has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.waiting import wait_for
from headrace_containers.client import Source
from headrace_containers.docker.engine import OWNER, owner
from headrace_servicekit.process.worker_pipes import JSON_CODEC, PARENT_VARIABLE, frame, read_frame


def containers_of(label: str) -> list[str]:
    """Containers of an owner, running or not."""
    listed = ["docker", "ps", "-aq", "--filter", f"label={OWNER}={label}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60).stdout.split()


class BrokerProcess:
    """A broker in a process of its own; its parent's end of the pipe is here."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace_containers.broker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), **environment},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(frame(JSON_CODEC.encode({"folder": str(folder), "users": [os.getuid()]})))
        self.process.stdin.flush()
        assert read_frame(self.process.stdout)  # type: ignore[arg-type]
        self.label = owner(self.process.pid)

    def source(self, warm: int = 0, **options: object) -> Source:
        """Containers by this broker."""
        return Source("docker", {"pull": "never", **options}, warm, self.folder)

    def containers(self) -> list[str]:
        """Its containers, running or not."""
        return containers_of(self.label)

    def kill(self) -> None:
        """Kills it, as a machine's memory may."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it as a simulator does."""
        self.kill()
        wait_for(lambda: not self.containers(), "containers to be removed")
