"""Processes of an engine, by id, and the memory that they use. Linux."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_modelkit.devices import free_bytes, process_bytes, total_bytes

from headrace_rollout.engines.base import Freed
from headrace_rollout.engines.weight_memory import available_bytes

if TYPE_CHECKING:
    import torch


KILL_S = 20.0
_POLL_S = 0.05


def kill(pids: Sequence[int]) -> None:
    """SIGKILL to those that still run; returns when they have ended. Raises TimeoutError naming what stays."""
    deadline = time.monotonic() + KILL_S
    left = list(pids)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = [pid for pid in left if _runs(pid)]
        if left and time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} of the engine did not end")
        if left:
            time.sleep(_POLL_S)


def _runs(pid: int) -> bool:
    """Whether it holds memory: a zombie waits for its parent alone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watermark:
    """Free and used memory at one moment, to be compared with a later one; `others`: see `used_by`."""

    def __init__(self, devices: Sequence[torch.device], pids: Sequence[int], others: int = 0) -> None:
        self._gpus = gpus_among(devices)
        self._pids = pids
        self._others = others
        self._before = self._used()

    def freed(self) -> Freed:
        """What was freed since."""
        used, free = self._used(), sum(map(free_bytes, self._gpus))
        return Freed(max(0, self._before - used), free if self._gpus else available_bytes(), max(0, used))

    def _used(self) -> int:
        return used_by(self._gpus, self._pids, self._others) if self._gpus else resident(self._pids)


def gpus_among(devices: Sequence[torch.device]) -> list[torch.device]:
    """Those that have memory of their own."""
    return [device for device in devices if device.type == "cuda"]


def used_on(gpus: Sequence[torch.device]) -> int:
    """Bytes in use there, by whomever."""
    return sum(total_bytes(device) - free_bytes(device) for device in gpus)


def used_by(gpus: Sequence[torch.device], pids: Iterable[int], others: int = 0) -> int:
    """Bytes that the processes which still run use there.

    Where the driver does not count by process, all that is in use less `others`: those that are not the engine's have
    given the GPU back, or had so much when the engine was started.
    """
    living = [pid for pid in pids if _runs(pid)]
    if not living:
        return 0
    counted = process_bytes(gpus, living)
    return max(0, used_on(gpus) - others) if counted is None else counted


def resident(pids: Iterable[int]) -> int:
    """Private and shared resident bytes of processes; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return total
