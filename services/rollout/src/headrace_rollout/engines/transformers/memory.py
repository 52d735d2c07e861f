"""Gives a model's memory back and takes it again, and measures what that was worth. Linux."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from pathlib import Path

import torch
from headrace_modelkit.weights import state_tensors
from torch import Tensor
from transformers import PreTrainedModel

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ParameterMemory:
    """The storage of a model's parameters, which can be dropped and made again (values then undefined)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = [tensor for _, tensor in state_tensors(model)]
        self._shapes = [tensor.shape for tensor in self._tensors]
        self.held = True

    def free(self) -> None:
        """Drops the storage; the model cannot run until `take` and a load."""
        self._replace([torch.Size([0])] * len(self._tensors))
        self.held = False

    def take(self) -> None:
        """Allocates the storage again."""
        if not self.held:
            self._replace(self._shapes)
            self.held = True

    def _replace(self, shapes: list[torch.Size]) -> None:
        for tensor, shape in zip(self._tensors, shapes, strict=True):
            tensor.data = _empty_like(tensor, shape)


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * _PAGE_BYTES


def available_bytes(device: str = "cpu") -> int:
    """Memory that is free for use on the device."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


def return_to_system(device: str = "cpu") -> None:
    """Hands freed memory back to the operating system or the device."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    # glibc keeps freed blocks of up to 32 MiB in its heap until it is told to trim.
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6"), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _empty_like(tensor: Tensor, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
