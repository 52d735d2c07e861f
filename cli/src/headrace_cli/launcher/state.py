"""What is known of a fleet: a state file replaced whole, and a lock that only a living launcher holds."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace_cli.launcher.data_dir import DataDir

DEATHS_THAT_FAIL = 3
"""A process that has ended so often while its fleet starts does not come up."""


@dataclass
class ProcessState:
    """One child of the launcher."""

    name: str
    kind: str
    pid: int
    restarts: int = 0


@dataclass
class FleetState:
    """A fleet as its launcher describes it; `phase` is starting, running, or stopping and what.

    `token_file` holds the HTTP API's token; it is empty where the API asks for none.
    """

    launcher_pid: int
    phase: str
    url: str
    grpc_address: str
    token_file: str
    shared_memory: str
    redis_url: str
    started_at: float
    expected: list[str] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)
    templates: list[int] = field(default_factory=list)
    """Processes that services are forked from; they work while those wait."""
    away: str = "not connected yet"
    """Why the launcher's line to the coordinator is down; "" while it is up."""
    refusal: str = ""
    """The coordinator's reason for refusing that line."""

    def write(self, data_dir: DataDir) -> None:
        """Replaces the state file in one piece."""
        aside = data_dir.state_file.with_suffix(".json.new")
        aside.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        aside.replace(data_dir.state_file)


def read_state(data_dir: DataDir) -> FleetState | None:
    """The state file's content; None when there is none, or when another user wrote it."""
    try:
        if data_dir.state_file.stat().st_uid != os.getuid():
            return None  # its token_file could name any file of ours, and its url anybody
        data = json.loads(data_dir.state_file.read_text(encoding="utf-8"))
        processes = [ProcessState(**item) for item in data.pop("processes")]
        return FleetState(**data, processes=processes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def living_state(data_dir: DataDir) -> FleetState | None:
    """The state of a fleet whose launcher lives; a state file that a dead one left behind does not count."""
    return read_state(data_dir) if is_locked(data_dir) else None


class FleetLock:
    """An exclusive lock on a data directory. The kernel drops it when the holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        """Takes the lock if nobody holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(data_dir: DataDir) -> bool:
    """Whether a launcher lives on the data directory."""
    if not data_dir.lock_file.exists():
        return False
    lock = FleetLock(data_dir.lock_file)
    if lock.acquire():
        lock.release()
        return False
    return True
