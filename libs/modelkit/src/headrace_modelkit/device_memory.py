"""A body in a GPU's memory that another process of the host maps: both of its sides.

`Layer` is what a kind of device does; `Cuda` shares allocations by CUDA's handles, and torch counts their users across
processes. Knows no versions and no transport.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from headrace_modelkit.broadcasting import device_id
from headrace_modelkit.devices import fixed_segments
from headrace_modelkit.pinned import Rooms, flat_bytes

warnings.filterwarnings("ignore", message="The given buffer is not writable")

MOST_COPIES = 2
"""Versions that are lent at a time: the one that engines read, and the next."""
SPARE_BYTES = 1 << 30
"""What has to stay free of a GPU beside a copy."""
SUM_BYTES = 64 << 20
Place = tuple[int, int]
"""Offset and bytes of a tensor in a body."""


@dataclass(frozen=True)
class Handle:
    """What another process needs to map a storage; see ShareDeviceMemoryResponse."""

    device: str
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int = 0
    counter_handle: bytes = b""
    counter_offset: int = 0
    event_handle: bytes = b""
    event_sync: bool = False


class Layer(Protocol):
    """A kind of device. `share` and `open` raise RuntimeError."""

    def name(self, device: torch.device | None) -> str:
        """What the device is called in every process; empty for one that shares no memory."""

    def free_bytes(self, device: torch.device) -> int: ...

    def share(self, flat: Tensor) -> Handle: ...

    def open(self, handle: Handle, device: torch.device) -> Tensor:
        """The bytes that were shared, for `device`, which may be another one of the host."""


class Cuda(Layer):
    """NVIDIA's and AMD's GPUs, by torch."""

    @override
    def name(self, device: torch.device | None) -> str:
        return device_id(device)

    @override
    def free_bytes(self, device: torch.device) -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    @override
    def share(self, flat: Tensor) -> Handle:
        storage: Any = flat.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
        return Handle(device_id(flat.device), handle, size, offset, counter, counter_offset, event, sync)

    @override
    def open(self, handle: Handle, device: torch.device) -> Tensor:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index or 0,
            handle.handle,
            handle.storage_bytes,
            handle.storage_offset_bytes,
            handle.counter_handle,
            handle.counter_offset,
            handle.event_handle,
            handle.event_sync,
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload,no-any-return]


@dataclass(eq=False)
class DeviceCopy:
    """A body on the GPU, with each tensor's sum."""

    key: Hashable
    flat: Tensor
    sums: list[int]
    users: int = 0


class DeviceCopies:
    """Bodies on a process's GPU, each for as long as somebody reads it. `device` tells the GPU, or None; `withheld` why
    it has no room for them.
    """

    def __init__(
        self,
        device: Callable[[], torch.device | None],
        layer: Layer | None = None,
        *,
        withheld: Callable[[], str] = lambda: "",
    ) -> None:
        self._device, self._layer, self._withheld = device, layer or Cuda(), withheld
        self._copies: dict[Hashable, DeviceCopy] = {}
        self._lock = threading.Lock()

    def why_not(self) -> str:
        """Why nothing can be lent now; empty where it can."""
        if not self._layer.name(self._device()):
            return "the source computes on no GPU now"
        return self._withheld()

    def lend(self, key: Hashable, body: memoryview, places: Sequence[Place]) -> tuple[DeviceCopy, Handle]:
        """The body's copy, made at the first call, and a handle of it. Raises RuntimeError."""
        with self._lock:
            if (reason := self.why_not()) or (device := self._device()) is None:
                raise RuntimeError(reason)
            copy = self._copies.get(key)
            if copy is None:
                if len(self._copies) == MOST_COPIES:
                    raise RuntimeError(f"{MOST_COPIES} versions are being read there already")
                free = self._layer.free_bytes(device)
                if free < len(body) + SPARE_BYTES:
                    wanted = len(body) + SPARE_BYTES
                    raise RuntimeError(f"the GPU has {free} bytes free, and a copy wants {wanted}")
                with fixed_segments():
                    flat = torch.empty(len(body), dtype=torch.uint8, device=device)
                Rooms(device).upload(flat_bytes(body), flat)
                copy = self._copies[key] = DeviceCopy(key, flat, sums_of(flat, places))
            handle = self._layer.share(copy.flat)
            copy.users += 1
            return copy, handle

    def lends(self, copy: DeviceCopy) -> bool:
        """Whether the copy was not dropped."""
        return self._copies.get(copy.key) is copy

    def give_back(self, copy: DeviceCopy) -> None:
        """One reader less; the last one's end frees the memory."""
        with self._lock:
            copy.users -= 1
            if not copy.users and self.lends(copy):
                del self._copies[copy.key]

    def drop(self) -> None:
        """Frees all: the GPU is not this process's any more."""
        with self._lock:
            self._copies.clear()


class DeviceMaps:
    """What an engine maps, on the device where it computes; `opens`: in this process, and not in its own."""

    def __init__(
        self,
        device: Callable[[], torch.device | None],
        layer: Layer | None = None,
        *,
        opens: Callable[[], bool] = lambda: True,
    ) -> None:
        self._device, self._layer, self._opens = device, layer or Cuda(), opens

    def why_not(self) -> str:
        """Why nothing can be mapped here; empty where it can."""
        return "" if self._layer.name(self._device()) else "the engine maps no memory of a GPU here"

    def open(self, handle: Handle, places: Sequence[Place], sums: Sequence[int]) -> Tensor | None:
        """The verified bytes; None where others open them.

        Raises RuntimeError, and ValueError with the index of a tensor that is another one.
        """
        if (reason := self.why_not()) or (device := self._device()) is None:
            raise RuntimeError(reason)
        if not self._opens():
            return None
        flat = self._layer.open(handle, device)
        wanted = max(offset + size for offset, size in places)
        if len(flat) < wanted:
            raise RuntimeError(f"{len(flat)} bytes are mapped, and the version has {wanted}")
        for index, (found, told) in enumerate(zip(sums_of(flat, places), sums, strict=True)):
            if found != told:
                raise ValueError(index)
        return flat


def tensor_at(flat: Tensor, dtype: str, shape: Sequence[int], offset: int, size: int) -> Tensor:
    """A tensor of a body; a view, unless it lies at an odd place."""
    kind: torch.dtype = getattr(torch, dtype)
    part = flat[offset : offset + size]
    return (
        (part if part.storage_offset() % kind.itemsize == 0 else part.clone()).view(kind).view(tuple(shape))
    )


def sums_of(flat: Tensor, places: Sequence[Place]) -> list[int]:
    """A 64-bit sum of each tensor's bytes, the same on every device: words times odd numbers by place.

    It finds bytes that changed or moved; it is no digest of strangers' bytes.
    """
    found = []
    for offset, size in places:
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for first in range(0, size, SUM_BYTES):
            length = min(SUM_BYTES, size - first)
            room = torch.zeros(-(-length // 8) * 8, dtype=torch.uint8, device=flat.device)
            room[:length] = flat[offset + first : offset + first + length]
            words = room.view(torch.int64)
            places_W = torch.arange(first // 8, first // 8 + len(words), device=flat.device)
            total += (words * ((2 * places_W + 1) * 0x5851F42D4C957F2D)).sum()
        found.append(int(total) & 0xFFFFFFFFFFFFFFFF)
    return found
