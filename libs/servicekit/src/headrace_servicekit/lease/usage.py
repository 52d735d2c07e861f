"""What a process and its children use of a host: memory, cores and GPUs, as heartbeats say it. Knows no lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.lease.gpus import MAKERS, GpuUse

GPU_EVERY_S = 5.0
"""Between two looks at GPUs: nvidia-smi takes up to a tenth of a second of a core."""
GPU_OLD_S = 3 * GPU_EVERY_S
"""After so long a look tells nothing: the maker's tool hangs, or nobody has looked since."""
_PROC = Path("/proc")


@dataclass
class Usage:
    """The usage of one process. `devices`: full names of the devices that it holds; `measured`: others to look at."""

    devices: Callable[[], Sequence[str]]
    ask: Callable[[], dict[str, GpuUse]]
    measured: Sequence[str] = ()
    _process: psutil.Process = field(default_factory=psutil.Process)
    _seconds: dict[int, float] = field(default_factory=dict)
    _looked_at: float = field(default_factory=time.monotonic)
    _gpus: dict[str, GpuUse] = field(default_factory=dict)
    _asked_at: float = -GPU_EVERY_S
    _seen_at: float = -GPU_OLD_S
    _asking: threading.Thread | None = None

    def resident_bytes(self) -> int:
        """Resident memory of the process alone: what its children share with it would count twice."""
        return int(self._process.memory_info().rss)

    def cores(self) -> float:
        """Cores that the process and its living children kept busy on average since the last call."""
        now, spent = time.monotonic(), _seconds(_tree(self._process.pid))
        busy = (
            sum(seconds - self._seconds.get(pid, 0.0) for pid, seconds in spent.items())
            if self._seconds
            else 0
        )
        elapsed = now - self._looked_at
        self._seconds, self._looked_at = spent, now
        return busy / elapsed if elapsed > 0 else 0.0

    def gpus(self) -> dict[str, GpuUse]:
        """Use of the GPUs that it holds or is to measure, by their names, as the last look found it; never waits."""
        held = [name for name in dict.fromkeys((*self.devices(), *self.measured)) if gpu_uuids([name])]
        now = time.monotonic()
        if held and now - self._asked_at >= GPU_EVERY_S and not (self._asking and self._asking.is_alive()):
            self._asked_at = now
            self._asking = threading.Thread(target=self._look, name="gpu use", daemon=True)
            self._asking.start()
        seen = self._gpus if now - self._seen_at < GPU_OLD_S else {}
        found = {name: seen.get(gpu_uuids([name])[0]) for name in held}
        return {name: use for name, use in found.items() if use is not None}

    def _look(self) -> None:
        asked_at = time.monotonic()
        self._gpus, self._seen_at = self.ask(), asked_at


def gpu_use() -> dict[str, GpuUse]:
    """Use of this machine's GPUs by UUID; of those that no maker's tool tells of, nothing."""
    return {uuid: use for maker in MAKERS for uuid, use in maker.use().items()}


def _tree(pid: int) -> Iterable[int]:
    """A process and its living descendants, by the kernel's lists of children."""
    waiting = [pid]
    while waiting:
        yield (each := waiting.pop())
        with suppress(OSError):
            for file in (_PROC / str(each) / "task").glob("*/children"):
                with suppress(OSError):
                    waiting += map(int, file.read_text().split())


def _seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds of processes until now, by their ids."""
    found = {}
    for pid in pids:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found
