"""Control groups of workers: how many processes, how much memory and how many cores one has, by cgroup v2 or v1.

A service that may make none has none: limits are then those of each process (`RLIMIT_NPROC`, `RLIMIT_DATA`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "headrace-"
_PERIOD_US = 100_000
_END_S = 5.0
_NEEDED = ("pids", "memory")
_ALL = (*_NEEDED, "cpu")


@dataclass(frozen=True)
class Bounds:
    """What one worker, with all that it starts, has at most."""

    processes: int
    memory_bytes: int
    cores: float


class Groups:
    """A group of this process's own, and one below it for each worker; see `find`."""

    def __init__(self, folders: Sequence[Path], version: int, controllers: Sequence[str]) -> None:
        self._folders, self._version, self._made = folders, version, 0
        self.controllers = tuple(controllers)

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Groups | None:
        """The groups that this process may make, which have processes and memory at least; None: it may make none."""
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = list(_mounts(proc / "mountinfo"))
        for root, kind, _, at in mounts:
            for number, _, path in own:
                if kind == "cgroup2" and number == "0" and (found := cls._second(at, _below(path, root))):
                    return found
        folders = {
            name: at / _below(path, root)
            for root, kind, options, at in mounts
            for _, names, path in own
            for name in _ALL
            if kind == "cgroup" and name in options and name in names.split(",")
        }
        made = {name: folder for name, path in folders.items() if (folder := _make(path))}
        if set(_NEEDED) <= set(made):
            return cls(list(dict.fromkeys(made.values())), 1, [name for name in _ALL if name in made])
        for folder in made.values():
            _remove(folder)
        return None

    @classmethod
    def _second(cls, mount: Path, path: str) -> Groups | None:
        """Below the nearest group whose children are controlled: it has no process of its own, or is the root."""
        for folder in (mount / path, *(mount / path).parents):
            if not folder.is_relative_to(mount):
                return None
            with suppress(OSError):
                has = (folder / "cgroup.subtree_control").read_text().split()
                given = [name for name in _ALL if name in has]
                if set(_NEEDED) <= set(given) and (made := _make(folder)):
                    text = " ".join(f"+{name}" for name in given)
                    (made / "cgroup.subtree_control").write_text(text)
                    return cls([made], 2, given)
        return None

    def __str__(self) -> str:
        return f"cgroup v{self._version} ({', '.join(self.controllers)})"

    def start(self, process: int, bounds: Bounds) -> Group:
        """A group with these bounds that has this process, and so all that it starts from now on. Raises OSError."""
        self._made += 1
        group = Group([folder / str(self._made) for folder in self._folders])
        try:
            for folder in group.folders:
                folder.mkdir(exist_ok=True)
                self._bound(folder, bounds)
                (folder / "cgroup.procs").write_text(str(process))
        except OSError:
            group.end()
            raise
        return group

    def _bound(self, folder: Path, bounds: Bounds) -> None:
        first = self._version == 1
        memory = "memory.limit_in_bytes" if first else "memory.max"
        quota = f"{max(1000, int(bounds.cores * _PERIOD_US))}"
        values = {
            "pids.max": str(bounds.processes),
            memory: str(bounds.memory_bytes),
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "cpu.cfs_period_us": str(_PERIOD_US),
            "cpu.cfs_quota_us": quota,
            "cpu.max": f"{quota} {_PERIOD_US}",
        }
        for name, value in values.items():
            if (folder / name).exists():
                (folder / name).write_text(value)

    def close(self) -> None:
        """Removes what is left."""
        for folder in self._folders:
            for each in folder.glob("[0-9]*"):
                Group([each]).end()
            _remove(folder)


@dataclass(frozen=True)
class Group:
    """One worker's, a folder for each hierarchy."""

    folders: Sequence[Path]

    def end(self) -> None:
        """Kills whatever is in it, daemons too, and removes it."""
        late = time.monotonic() + _END_S
        for folder in self.folders:
            with suppress(OSError):
                (folder / "pids.max").write_text("0")  # nothing is started any more
        for folder in self.folders:
            while folder.exists() and time.monotonic() < late:
                with suppress(OSError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                if not _remove(folder):
                    time.sleep(0.01)


def _mounts(file: Path) -> Iterator[tuple[str, str, list[str], Path]]:
    """Of cgroups: the root that is mounted, the kind, the controllers, and where."""
    for line in file.read_text().splitlines():
        before, _, behind = line.partition(" - ")
        kind, _, options = behind.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            words = before.split()
            yield words[3], kind, options.split(","), Path(words[4])


def _below(path: str, root: str) -> str:
    """A group's path below what is mounted of the hierarchy."""
    return os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."


def _make(folder: Path) -> Path | None:
    """This process's own group in a folder; those of processes that have ended are removed."""
    made = folder / f"{_PREFIX}{os.getpid()}"
    try:
        for left in folder.glob(f"{_PREFIX}[0-9]*"):
            if not Path("/proc", left.name.removeprefix(_PREFIX)).exists():
                Groups([left], 0, ()).close()
        made.mkdir(exist_ok=True)
        return made
    except OSError:
        return None


def _remove(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
