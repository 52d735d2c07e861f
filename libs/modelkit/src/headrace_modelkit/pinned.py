"""Bytes between a host's memory and a GPU, through two rooms of pinned memory: threads fill or empty one while the
GPU copies the other. Pageable memory goes at a quarter of the link's rate, and to pin all takes longer than to copy it.

Knows no weights. On a CPU the same code runs without pinned memory and without events.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

warnings.filterwarnings("ignore", message="The given buffer is not writable")

ROOM_BYTES = 64 << 20
MOST_THREADS = 16


def flat_bytes(data: memoryview) -> Tensor:
    """A buffer as a tensor of bytes, without a copy; a read-only one is only read."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def copy_bytes(target: Tensor, source: Tensor, threads: int | None = None) -> None:
    """Copies bytes within the host, in as many of torch's threads as read its memory faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(MOST_THREADS, before if threads is None else threads))
    try:
        target.copy_(source)
    finally:
        torch.set_num_threads(before)


@contextmanager
def pin(flat: Tensor) -> Iterator[Tensor]:
    """Memory of this process, pinned meanwhile where there is a GPU, which then copies to it by itself.

    Raises RuntimeError.
    """
    runtime: Any = torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    if runtime is not None and (code := int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))):
        raise RuntimeError(f"{flat.nbytes} bytes could not be pinned (CUDA error {code}); raise ulimit -l")
    try:
        yield flat
    finally:
        if runtime is not None:
            runtime.cudaHostUnregister(flat.data_ptr())


class Rooms:
    """Two rooms of a device's copies; used by one thread. They are made at the first copy, and kept.

    `used`: whether whole tensors go through them, by default those of a GPU.
    """

    def __init__(self, device: torch.device, *, threads: int | None = None, used: bool | None = None) -> None:
        self.device = device
        self._gpu = device.type == "cuda"
        self._used = self._gpu if used is None else used
        self._threads = threads
        self._rooms: list[Tensor] = []
        self._busy: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Bytes of the host into as many on the device; `source` may change when this returns."""
        for first in range(0, len(source), ROOM_BYTES):
            part = source[first : first + ROOM_BYTES]
            index, room = self._turn(len(part))
            self._await(index)
            copy_bytes(room, part, self._threads)
            target[first : first + len(part)].copy_(room, non_blocking=self._gpu)
            self._record(index)

    def download(self, source: Tensor, target: Tensor) -> None:
        """Bytes of the device into as many on the host, which are there when this returns."""
        empty: Callable[[], None] | None = None
        for first in range(0, len(source), ROOM_BYTES):
            part = source[first : first + ROOM_BYTES]
            index, room = self._turn(len(part))
            self._await(index)  # what was uploaded from it before
            room.copy_(part, non_blocking=self._gpu)
            self._record(index)
            if empty is not None:
                empty()
            empty = partial(self._empty, index, room, target[first : first + len(part)])
        if empty is not None:
            empty()

    def to_device(self, tensor: Tensor) -> Tensor:
        """As `Tensor.to`, of a tensor on the host."""
        if not self._used or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return tensor.to(self.device)
        made = torch.empty_like(tensor, device=self.device)
        self.upload(_bytes_of(tensor), _bytes_of(made))
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of a tensor on the device."""
        if not self._used or not tensor.is_contiguous() or tensor.device.type != self.device.type:
            return tensor.to("cpu", copy=True)
        made = torch.empty_like(tensor, device="cpu")
        self.download(_bytes_of(tensor), _bytes_of(made))
        return made

    def _empty(self, index: int, room: Tensor, target: Tensor) -> None:
        self._await(index)
        copy_bytes(target, room, self._threads)

    def _turn(self, size: int) -> tuple[int, Tensor]:
        index, self._next = self._next, 1 - self._next
        if not self._rooms:
            self._rooms = [
                torch.empty(ROOM_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._gpu)
                for _ in range(2)
            ]
        return index, self._rooms[index][:size]

    def _await(self, index: int) -> None:
        event, self._busy[index] = self._busy[index], None
        if event is not None:
            event.synchronize()

    def _record(self, index: int) -> None:
        if self._gpu:
            event = self._busy[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))


@cache
def rooms_of(device: torch.device) -> Rooms:
    """The rooms that all copies of this process's one thread share which computes on the device."""
    return Rooms(device)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
