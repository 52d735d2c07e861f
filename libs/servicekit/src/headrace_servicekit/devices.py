"""Which devices this host has, and what holding a CPU slot means: an affinity mask.

Names are "cpu:0" and "gpu:0" on a host, "{host}/cpu:0" in the fleet.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import grpc

from headrace_servicekit.errors import ServiceError

_NAME = re.compile(r"(?:[^/]+/)?(cpu|gpu):(\d+)")


def detect_devices() -> list[str]:
    """The host's devices without its name: its NVIDIA GPUs, or else one CPU slot per usable core."""
    gpus = _count_gpus()
    if gpus:
        return [f"gpu:{index}" for index in range(gpus)]
    return [f"cpu:{core}" for core in sorted(os.sched_getaffinity(0))]


def qualify(host: str, devices: Sequence[str]) -> list[str]:
    """Device names with the host in front; names that have one keep it. Raises ServiceError INVALID."""
    for name in devices:
        _parse(name)
    return [name if "/" in name else f"{host}/{name}" for name in devices]


def bind_cpu(devices: Sequence[str]) -> int:
    """Binds all threads of this process to the cores of the leased "cpu:N" slots.

    Returns the number of threads to compute with. GPU devices leave the affinity alone. Raises ServiceError
    INVALID when a core does not exist. Threads started later inherit the mask of the thread that starts them.
    """
    cores = {index for kind, index in map(_parse, devices) if kind == "cpu"}
    if not cores:
        return len(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile
        except OSError as error:
            raise _invalid(
                f"cannot bind to cores {sorted(cores)}: {error.strerror}; this host has other cores"
            ) from error
    return len(cores)


def let_idle_threads_sleep() -> None:
    """Idle OpenMP threads sleep instead of spinning. Call it before torch is imported.

    Two busy processes whose idle threads spin on shared cores slow each other down tenfold.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _parse(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise _invalid(f"{name!r} is no device; write cpu:N or gpu:N, or HOST/cpu:N")
    return match[1], int(match[2])


def _count_gpus() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(list(driver.iterdir()))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _invalid(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)
