"""From the GPUs of a lease to torch's devices. Knows no lease: only UUIDs, which torch numbers as it likes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceNotSeen(Exception):
    """A leased GPU that this process does not see; the message says which it sees."""


def torch_devices(gpu_uuids: Sequence[str]) -> tuple[torch.device, ...]:
    """torch's devices of GPUs named "GPU-8f2a…", in their order; the host when none is named.

    Raises DeviceNotSeen.
    """
    if not gpu_uuids:
        return (torch.device("cpu"),)
    seen = {_plain(uuid): index for index, uuid in enumerate(_seen())}
    if missing := [uuid for uuid in gpu_uuids if _plain(uuid) not in seen]:
        raise DeviceNotSeen(
            f"{', '.join(missing)} is leased and this process sees {', '.join(seen) or 'no GPU'}; give its container "
            "the GPU (CUDA_VISIBLE_DEVICES, --gpus), or start it with --devices that it sees"
        )
    return tuple(torch.device("cuda", seen[_plain(uuid)]) for uuid in gpu_uuids)


def used_bytes(device: torch.device) -> int:
    """Memory of this process on a GPU, by torch's allocator; the CUDA context is not in it."""
    return int(torch.cuda.memory_reserved(device))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


def total_bytes(device: torch.device) -> int:
    """Memory that a GPU has."""
    return int(torch.cuda.mem_get_info(device)[1])


def _seen() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()
