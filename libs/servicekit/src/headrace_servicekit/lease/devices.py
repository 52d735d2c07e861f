"""Which devices this machine has, how they are named, and what holding a CPU slot means: an affinity mask.

A device is named by what it is, so that all who see it name it alike, two containers too: "{boot id}/cpu:0" is a
core of a running machine, "GPU-8f2a…/gpu:0" a GPU by its UUID, with the driver's number of it on that machine, and
"MIG-c738…/gpu:0.1" a part of one.
People write the last part alone.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path

from headrace_servicekit.lease.gpus import MAKERS, Gpu, find_gpus
from headrace_servicekit.rpc.errors import invalid

_NAME = re.compile(r"(?:([^/]+)/)?(?:(cpu):(\d+)|(gpu):(\d+(?:\.\d+)?))")
_MIG = "MIG-"
PER_DEVICE = "devices"
"""Stands for the number of a container's instances: one for each of its devices."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SPINS = "2000"
"""Two threads alone gain up to a half over none; two processes of two threads on the same two cores lose a fifth."""


WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Values with which torch allows cuBLAS in a deterministic run."""


def detect_devices() -> list[str]:
    """Names of the GPUs that this process can use, or else of one CPU slot per usable core."""
    if gpus := _gpus():
        return [gpu.name for gpu in gpus]
    return [f"{boot_id()}/cpu:{core}" for core in sorted(os.sched_getaffinity(0))]


def instance_count(text: str) -> int:
    """Number of instances that --count or HEADRACE_COUNT asks for. Raises ValueError naming what is allowed."""
    if text == PER_DEVICE:
        return len(detect_devices())
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 1024:
        return int(text)
    raise ValueError(f"{text!r} is no number of instances; write 1 to 1024, or {PER_DEVICE}")


def boot_id() -> str:
    """What names this machine since it was started; all its containers read the same one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()  # not Linux


def full_names(devices: Sequence[str]) -> list[str]:
    """Names of this machine's devices in full; those that say whose they are stay. Raises ServiceError INVALID."""
    asked = any(_parse(name)[:2] == ("", "gpu") for name in devices)
    gpus = {gpu.number: gpu.name for gpu in _gpus()} if asked else {}
    found = []
    for name in devices:
        owner, kind, number = _parse(name)
        if not owner and kind == "gpu" and number not in gpus:
            seen = ", ".join(f"gpu:{number}" for number in gpus) or "no GPU"
            raise invalid(
                f"{name!r} is not among the GPUs that this process can use, which are {seen}; see the container's GPUs "
                "and CUDA_VISIBLE_DEVICES"
            )
        found.append(name if owner else gpus[number] if kind == "gpu" else f"{boot_id()}/{name}")
    return found


def gpu_uuids(devices: Iterable[str]) -> list[str]:
    """UUIDs ("GPU-8f2a…", "MIG-c738…") of the GPUs among leased devices, in their order."""
    return [owner for owner, kind, _ in map(_parse, devices) if kind == "gpu"]


def own_part(devices: Sequence[str], index: int, *, from_end: bool = False) -> list[str]:
    """What a process has of the devices that several see: all, where none is a MIG device.

    CUDA shows a process one MIG device and nothing beside it, so each of several has one by its number. Those that
    count `from_end` meet the others as late as can be: a trainer and the rollouts.
    """
    parts = [name for name in devices if name.startswith(_MIG)]
    whole = [name for name in devices if name not in parts]
    choices = [*([whole] if whole else []), *([part] for part in parts)]
    if not parts:
        return whole
    return choices[(-1 - index if from_end else index) % len(choices)]


def show_part(devices: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Has CUDA show this process its own GPUs alone where this machine has MIG devices; before CUDA starts."""
    own = gpu_uuids(devices)
    if own and any(gpu.uuid.startswith(_MIG) for gpu in _gpus()):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def core_of(slot: str) -> int:
    """The core of a CPU slot: its own, or beyond the last core of the host one that it shares with another slot.

    So that what needs several devices can be tried on a small machine. Raises ServiceError INVALID.
    """
    return int(_parse(slot)[2]) % (os.cpu_count() or 1)


def bind_cpu(devices: Sequence[str], process: int | None = None) -> int:
    """Binds all threads of this process, or of another one by its id, to the cores of the leased CPU slots.

    Returns the number of threads to compute with. A slot beyond the host's cores shares the core of `core_of`. GPU
    devices leave the affinity alone. Raises ServiceError INVALID for cores that this container may not use. Threads
    started later inherit the mask of the thread that starts them.
    """
    cores = {core_of(name) for name in devices if _parse(name)[1] == "cpu"}
    if not cores:
        return len(os.sched_getaffinity(0))
    try:
        threads = os.listdir(f"/proc/{process or 'self'}/task")
    except FileNotFoundError:
        return len(cores)  # the process ended meanwhile
    for thread in threads:
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile
        except OSError as error:
            raise invalid(
                f"cannot bind to cores {sorted(cores)}: {error.strerror}; this container has other cores: leave "
                "--devices out to use those"
            ) from error
    return len(cores)


def prepare_torch(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what OpenMP and cuBLAS read as they start, where the user has not: before torch is imported.

    Idle OpenMP threads sleep after they have spun for microseconds: two busy processes whose idle threads spin on
    shared cores slow each other down tenfold. Without any spinning every operation of two threads pays for a wake-up,
    which on a virtual machine takes longer than a small operation.

    cuBLAS sums in one order with `WORKSPACES` alone. It reads them once, so an instance has them before any run says
    `deterministic: true`; they are torch's own default on GPUs since Hopper.
    """
    if environment.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    environment.setdefault(WORKSPACES, FIXED_WORKSPACES[0])


def _parse(name: str) -> tuple[str, str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise invalid(
            f"{name!r} is no device; write cpu:N or gpu:N, or a full name as `headrace leases` shows"
        )
    return match[1] or "", match[2] or match[4], match[3] or match[5]


def _gpus() -> list[Gpu]:
    return find_gpus(os.environ, MAKERS)
