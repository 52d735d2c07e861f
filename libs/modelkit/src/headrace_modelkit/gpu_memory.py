"""Memory of GPUs by process, as the driver counts it: with contexts and what libraries allocate themselves.

Of NVIDIA by four calls of NVML, the library that every driver brings; of AMD in files of the kernel's compute driver.
Knows no torch and no lease.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _MORE = 0, 7
_NOT_COUNTED = ctypes.c_ulonglong(-1).value
_UUID_BYTES = 96


class NvmlMissing(Exception):
    """There is no driver here, or it does not answer; the message says which call failed."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """An open NVML. `library` is what ctypes loads, or a test's own."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    @classmethod
    @cache
    def open(cls) -> Self:
        """The driver's. Raises NvmlMissing."""
        try:
            return cls(ctypes.CDLL(LIBRARY))
        except OSError as error:
            raise NvmlMissing(f"{LIBRARY}: {error}") from error

    def processes(self, uuid: str) -> dict[int, int]:
        """Bytes by id of each process that computes on a GPU (or MIG device) named "GPU-8f2a…". Raises NvmlMissing.

        Where this container has process ids of its own, they are the host's. A process whose memory the driver does not
        count has 0.
        """
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(device))
        return self._processes(device)

    def used_by(self, pids: Iterable[int]) -> dict[str, int]:
        """Bytes by GPU's UUID that some processes use there, of all GPUs. Raises NvmlMissing."""
        wanted, count = {*pids}, ctypes.c_uint()
        found: dict[str, int] = {}
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            self._call("nvmlDeviceGetUUID", device, name, ctypes.c_uint(_UUID_BYTES))
            used = self._processes(device)
            found[name.value.decode()] = sum(size for pid, size in used.items() if pid in wanted)
        return found

    def _processes(self, device: ctypes.c_void_p) -> dict[int, int]:
        count, name = ctypes.c_uint(0), "nvmlDeviceGetComputeRunningProcesses_v3"
        status = self._status(name, device, ctypes.byref(count), None)
        # Others may start between two calls: room for more, and another try where that is not enough.
        while status == _MORE:
            count.value = 2 * count.value + 8
            listed = (_Process * count.value)()
            status = self._status(name, device, ctypes.byref(count), listed)
            if status == _SUCCESS:
                rows = listed[: count.value]
                return {row.pid: 0 if row.bytes == _NOT_COUNTED else row.bytes for row in rows}
        if status != _SUCCESS:
            raise NvmlMissing(f"{name} failed with status {status}")
        return {}

    def _call(self, name: str, *arguments: Any) -> None:
        if status := self._status(name, *arguments):
            raise NvmlMissing(f"{name} failed with status {status}")

    def _status(self, name: str, *arguments: Any) -> int:
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError as error:  # an older driver
            raise NvmlMissing(f"the driver has no {name}") from error


ROOT = Path("/")
_KFD = "sys/class/kfd/kfd"


def used_by_kfd(identifiers: Sequence[str], pids: Iterable[int], root: Path = ROOT) -> int | None:
    """Bytes that processes use on GPUs, which are named by the sixteen digits of their `unique_id`.

    None where the driver does not say: in a container whose process ids are not the host's none of them is listed.
    """
    numbers = {number for number, identifier in _numbers(root).items() if identifier in identifiers}
    counted = [_of_process(root / _KFD / "proc" / str(pid), numbers) for pid in pids]
    listed = [size for size in counted if size is not None]
    return sum(listed) if listed and len(numbers) == len(identifiers) else None


def _of_process(folder: Path, numbers: Iterable[str]) -> int | None:
    if not folder.is_dir():
        return None
    total = 0
    for number in numbers:
        with suppress(OSError, ValueError):  # the process ended meanwhile, or uses none of it
            total += int((folder / f"vram_{number}").read_text())
    return total


def _numbers(root: Path) -> dict[str, str]:
    """The driver's number of each GPU, and its identifier."""
    found = {}
    for node in (root / _KFD / "topology/nodes").glob("*"):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in (node / "properties").read_text().splitlines())
            facts = {line[0]: line[1] for line in lines if len(line) == 2}
            number = (node / "gpu_id").read_text().strip()
            if number != "0":
                found[number] = f"{int(facts.get('unique_id', '0')):016x}"
    return found
