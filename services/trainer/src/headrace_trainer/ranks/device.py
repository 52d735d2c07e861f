"""The device and the cores that a process has leased, and computing on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from headrace_modelkit.devices import free_bytes, used_bytes
from headrace_modelkit.threads import Threads
from headrace_servicekit.instance import host_memory
from headrace_servicekit.lease.leases import Memory


class LeasedDevice:
    """`device` is the first that is leased: a trainer group is formed on it. `cores` are the lease's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.cores = 1
        self._threads = Threads()

    def use(self, devices: tuple[torch.device, ...], cores: int) -> None:
        """Sets the cores to compute with from the next round on, and the device from the next group on."""
        self.cores = cores
        if devices:
            self.device = devices[0]

    def measure_anew(self) -> None:
        """Drops what was measured of numbers of threads: another model's work may be faster with another number."""
        self._threads = Threads()

    @contextmanager
    def computing(self, device: torch.device, kind: str, size: int, *, single: bool) -> Iterator[None]:
        """Around one piece of work; `size` is what its seconds rise with, 0 where that is not known.

        `single`: in one thread, whatever cores there are.
        """
        self._threads.single = single
        self._threads.lease(self.cores)
        self._threads.fixed = device.type != "cpu"
        with current(device), self._threads.work(kind, size) if size else nullcontext():
            yield

    def memory(self, device: torch.device | None = None) -> Memory:
        """Free and used bytes where `device` computes, by default the leased one."""
        where = device or self.device
        return Memory(free_bytes(where), used_bytes(where)) if where.type == "cuda" else host_memory()


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """fully_shard and NCCL take the thread's current GPU: it is the leased one within the body, and only there."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
