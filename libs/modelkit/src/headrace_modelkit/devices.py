"""From the GPUs of a lease to torch's devices, and the memory that each process has there. Knows no lease.

Memory is as the driver counts it, with contexts and what libraries allocate themselves: of NVIDIA by four calls of
NVML, the library that every driver brings; of AMD in files of the kernel's compute driver.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

LIBRARY = "libnvidia-ml.so.1"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_MEMORY = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
"""What is said by torch's allocators, and by libraries that allocate beside them (NCCL, cuBLAS, cuDNN)."""
_SUCCESS, _MORE = 0, 7
_NOT_COUNTED = ctypes.c_ulonglong(-1).value
_UUID_BYTES = 96
_Moved = TypeVar("_Moved")


def moved(given: _Moved, device: torch.device) -> _Moved:
    """The same on `device`: a tensor, or a mapping or a dataclass with such; what else these have stays as it is."""
    found: Any = given
    if isinstance(given, torch.Tensor):
        found = given.to(device, non_blocking=True)
    elif isinstance(given, Mapping):
        found = {name: moved(value, device) for name, value in given.items()}
    elif is_dataclass(given) and not isinstance(given, type):
        own = {each.name: moved(getattr(given, each.name), device) for each in fields(given)}
        found = replace(given, **own)
    result: _Moved = found
    return result


def grow_segments() -> None:
    """Lets torch's GPU allocator grow its segments in place, so that micro-batches of many lengths leave no holes.

    Not where the user configures it, and not in a process whose memory sleeps in a cuMem pool (vLLM's, SGLang's).
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        _set_segments(grow=True)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """What is allocated within can be mapped by other processes at once: a segment that grows is opened piece by
    piece, through descriptors that a container may not hand out.
    """
    bare: Any = torch._C  # torch has no public name for what PYTORCH_ALLOC_CONF says at the start
    grows = "expandable_segments:True" in bare._accelerator_getAllocatorSettings()
    if grows:
        _set_segments(grow=False)
    try:
        yield
    finally:
        if grows:
            _set_segments(grow=True)


def _set_segments(*, grow: bool) -> None:
    bare: Any = torch._C
    bare._accelerator_setAllocatorSettings(f"expandable_segments:{grow}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room for what was asked of it, whoever says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(words: str) -> bool:
    """Whether these are words about a device without memory: of an error, or of what another process has logged."""
    return any(mark in words for mark in NO_MEMORY)


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
_FIRST_PIDS = 0xEFFFFFFC
"""The kernel's PROC_PID_INIT_INO: the inode of the namespace in which the machine was started."""
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


class DeviceNotSeen(Exception):
    """A leased GPU that this process does not see; the message says which it sees."""


def torch_devices(gpu_uuids: Sequence[str]) -> tuple[torch.device, ...]:
    """torch's devices of GPUs named "GPU-8f2a…", in their order; the host when none is named.

    Raises DeviceNotSeen.
    """
    if not gpu_uuids:
        return (torch.device("cpu"),)
    # A process computes on MIG devices that it was started with, in the order of their names; their UUIDs may be those
    # of the whole GPU to it.
    seen = {_plain(uuid): index for index, uuid in enumerate(_named_mig() or _seen())}
    if missing := [uuid for uuid in gpu_uuids if _plain(uuid) not in seen]:
        raise DeviceNotSeen(
            f"{', '.join(missing)} is leased and this process sees {', '.join(seen) or 'no GPU'}; give its container "
            "the GPU (CUDA_VISIBLE_DEVICES, --gpus), or start it with --devices that it sees"
        )
    return tuple(torch.device("cuda", seen[_plain(uuid)]) for uuid in gpu_uuids)


def used_bytes(device: torch.device) -> int:
    """Memory of this process on a GPU, by torch's allocator; the CUDA context is not in it."""
    return int(torch.cuda.memory_reserved(device))


def bound_memory(devices: Sequence[torch.device], part: float) -> None:
    """torch takes no more than a part of each GPU's memory; 1.0: all. On the host nothing is bounded."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(part, device)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


def has_hosts_pids(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether this process is in the first namespace of process ids, whose numbers drivers list."""
    try:
        return namespace.stat().st_ino == _FIRST_PIDS
    except OSError:  # not Linux
        return False


def process_bytes(devices: Sequence[torch.device], pids: Sequence[int]) -> int | None:
    """Bytes that processes use on GPUs, their contexts included; None where the driver does not say.

    So it is without NVML, on WSL2, and in a container with process ids of its own: the driver's list has the host's, of
    which one may be the number of quite another process here.
    """
    if not has_hosts_pids():
        return None
    if torch.version.hip is not None:
        return used_by_kfd([_plain(driver_name(device)) for device in devices], pids)
    try:
        nvml = Nvml.open()
        listed: list[dict[int, int]] = [nvml.processes(driver_name(device)) for device in devices]
    except NvmlMissing:
        return None
    if not any(pid in used for used in listed for pid in pids):
        return None
    return sum(used.get(pid, 0) for used in listed for pid in pids)


def variables_for(devices: Sequence[torch.device]) -> dict[str, str]:
    """Environment of a child that is to see these of this process's GPUs alone; nothing where there is none."""
    gpus = [device.index or 0 for device in devices if device.type == "cuda"]
    if not gpus:
        return {}
    names = ["CUDA_VISIBLE_DEVICES"]
    if torch.version.hip is not None and "HIP_VISIBLE_DEVICES" in os.environ:
        names.append("HIP_VISIBLE_DEVICES")  # HIP reads it, and CUDA's where there is none
    seen = os.environ.get(names[-1], "")
    shown = (
        [name.strip() for name in seen.split(",")] if seen else [*map(str, range(torch.cuda.device_count()))]
    )
    return dict.fromkeys(names, ",".join(shown[index] for index in gpus))


def driver_name(device: torch.device) -> str:
    """A GPU's UUID as the driver writes it, "GPU-8f2a…"; of a MIG device what CUDA_VISIBLE_DEVICES calls it."""
    index = device.index or 0
    named = _named_mig()
    return named[index] if index < len(named) else f"GPU-{_seen()[index]}"


def model_name(device: torch.device) -> str:
    """What a GPU's maker calls its model, as "NVIDIA H100 80GB HBM3"; of a MIG device with its profile."""
    return str(torch.cuda.get_device_name(device))


def total_bytes(device: torch.device) -> int:
    """Memory that a GPU has."""
    return int(torch.cuda.mem_get_info(device)[1])


def _seen() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _named_mig() -> list[str]:
    """MIG devices by which CUDA_VISIBLE_DEVICES tells this process what it sees; none where it names no such."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names if names[0].startswith("MIG-") else []


def _plain(uuid: str) -> str:
    """A UUID as makers and torch write it, in one form.

    >>> _plain("GPU-8F2A-1"), _plain("37326666-3964-3161-3361-346261366262")
    ('8f2a-1', '72ff9d1a3a4ba6bb')
    """
    bare = uuid.removeprefix("GPU-").lower()
    try:  # AMD's sixteen bytes are its identifier's sixteen digits
        digits = bytes.fromhex(bare.replace("-", "")).decode("ascii")
        return digits if len(digits) == 16 and int(digits, 16) >= 0 else bare
    except ValueError:
        return bare
