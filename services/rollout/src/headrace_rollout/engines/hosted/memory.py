"""What an engine's processes use of memory, measured from outside. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_modelkit.devices import free_bytes, total_bytes

from headrace_rollout.engines.base import Freed
from headrace_rollout.engines.weight_memory import available_bytes

if TYPE_CHECKING:
    import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watermark:
    """Free and used memory at one moment, to be compared with a later one."""

    def __init__(self, devices: Sequence[torch.device], pids: Sequence[int]) -> None:
        self._gpus = gpus_among(devices)
        self._pids = pids
        self._before = self._used()

    def freed(self) -> Freed:
        """What was freed since."""
        used, free = self._used(), sum(map(free_bytes, self._gpus))
        return Freed(max(0, self._before - used), free if self._gpus else available_bytes(), max(0, used))

    def _used(self) -> int:
        # Other processes of a leased GPU have given it back: what is not free there is the engine's.
        return used_on(self._gpus) if self._gpus else resident(self._pids)


def gpus_among(devices: Sequence[torch.device]) -> list[torch.device]:
    """Those that have memory of their own."""
    return [device for device in devices if device.type == "cuda"]


def used_on(gpus: Sequence[torch.device]) -> int:
    """Bytes in use there, by whomever."""
    return sum(total_bytes(device) - free_bytes(device) for device in gpus)


def resident(pids: Iterable[int]) -> int:
    """Private and shared resident bytes of processes; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return total
