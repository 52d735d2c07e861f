"""How many more processes this host can hold, by memory. Starts and stops none.

Memory of a process: its proportional set size, descendants included, so that shared weights count once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1024**3
ASSUMED_BYTES = {"rollout": 3 * GIB // 4, "trainer": GIB, "reward": GIB // 4, "simulator": GIB // 4}
"""By kind, until an instance was seen with more: one that has not opened a run yet holds little."""
RESERVED_SHARE = 0.1
LEAST_RESERVED_BYTES = GIB // 2
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class HostMemory:
    """Memory of this host, or of the container if that has less, in bytes."""

    total: int
    available: int

    @property
    def reserved(self) -> int:
        """Bytes that stay free for everything else."""
        return max(LEAST_RESERVED_BYTES, int(RESERVED_SHARE * self.total))


def host_memory(cgroup: Path = _CGROUP) -> HostMemory:
    """Memory as it is now; `cgroup` is the folder of the container's limits."""
    host = psutil.virtual_memory()
    total, available = int(host.total), int(host.available)
    for limit_file, used_file, cached_key in _CGROUP_FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None and limit < total:
            cached = _cached(cgroup / Path(used_file).with_name("memory.stat"), cached_key)
            total, available = limit, min(available, max(0, limit - used + cached))
    return HostMemory(total, available)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _cached(path: Path, key: str) -> int:
    """Bytes of the file cache that the kernel would give back."""
    try:
        pairs = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(pairs.get(key, 0))


def process_bytes(pid: int) -> int:
    """Memory of a process and its descendants; 0 when it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(map(_own_bytes, [process, *process.children(recursive=True)]))
    except psutil.NoSuchProcess:
        return 0


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class Capacity:
    """Remembers the largest process of each kind, and refuses more than the host can hold."""

    def __init__(
        self,
        host: Callable[[], HostMemory] = host_memory,
        process: Callable[[int], int] = process_bytes,
        assumed: Mapping[str, int] = ASSUMED_BYTES,
    ) -> None:
        self._host = host
        self._process = process
        self._assumed = assumed
        self._largest: dict[str, int] = {}

    def sample(self, processes: Sequence[tuple[str, int]]) -> list[int]:
        """Measures processes, given as kind and pid (0: not started yet); returns the bytes of each."""
        measured = [self._process(pid) if pid else 0 for _, pid in processes]
        for (kind, _), size in zip(processes, measured, strict=True):
            self._largest[kind] = max(size, self._largest.get(kind, 0))
        return measured

    def refusal(self, kind: str, count: int, processes: Sequence[tuple[str, int]]) -> str:
        """Why `count` processes of a kind are too many beside the wanted `processes`; empty when they fit.

        Processes that have not grown to their kind's size yet are counted with what they will still need.
        """
        measured = self.sample(processes)
        memory = self._host()
        promised = sum(
            max(0, self._each(other) - size) for (other, _), size in zip(processes, measured, strict=True)
        )
        now = sum(other == kind for other, _ in processes)
        room = memory.available - memory.reserved - promised
        most = now + max(0, room) // self._each(kind)
        if count <= max(most, now):
            return ""
        kept = f"{_gib(memory.reserved)} kept free"
        if promised:
            kept += f" and {_gib(promised)} for processes that may still grow"
        return (
            f"scale {kind}={count}: this host can hold {most} {kind} processes ({self._each_text(kind)}; "
            f"{_gib(memory.available)} of {_gib(memory.total)} GiB available, {kept}); {now} run now"
        )

    def _each(self, kind: str) -> int:
        return max(self._largest.get(kind, 0), self._assumed.get(kind, GIB))

    def _each_text(self, kind: str) -> str:
        largest, each = self._largest.get(kind, 0), self._each(kind)
        if largest == each:
            return f"{_gib(each)} GiB each, measured"
        seen = f"the largest so far has {_gib(largest)}" if largest else "none has been measured yet"
        return f"{_gib(each)} GiB each, assumed: {seen}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}".removesuffix("0")
