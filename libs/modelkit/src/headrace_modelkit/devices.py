"""From the GPUs of a lease to torch's devices. Knows no lease: only UUIDs, which torch numbers as it likes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from headrace_modelkit.gpu_memory import Nvml, NvmlMissing, used_by_kfd


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


def process_bytes(devices: Sequence[torch.device], pids: Sequence[int]) -> int | None:
    """Bytes that processes use on GPUs, their contexts included; None where the driver does not say.

    So it is without NVML, and in a container whose process ids are not the host's: none of `pids` is listed then.
    """
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
