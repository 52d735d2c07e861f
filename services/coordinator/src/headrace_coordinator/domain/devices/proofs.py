"""What proves that a quarantined device is free, where no supervisor has seen its last holder end. Pure.

A holder that hears nothing stops by its own clock within one lease lifetime. So a CPU slot, of which it keeps
nothing, is free after that. A GPU is free once nobody uses its memory, or once its machine has been started again.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace_coordinator.domain.devices.leases import KEPT_BYTES, Quarantine, is_gpu


def proof_of_free(
    device: str, quarantine: Quarantine, boots: Iterable[str], used: int | None, *, holder_stopped: bool
) -> str:
    """Why a quarantined device is free; empty: nothing proves it yet.

    `boots`: boot ids of living instances that see the device. `used`: bytes of it in use by anybody, as one of them
    measured after the holder's time was over; None where nobody has. `holder_stopped`: a lease lifetime has passed.
    """
    if quarantine.boot_id and any(boot not in ("", quarantine.boot_id) for boot in boots):
        return "its machine has been started again"
    if not holder_stopped:
        return ""
    if not is_gpu(device):
        return "its holder has stopped by its own clock: one lease lifetime has passed"
    if used is not None and used <= KEPT_BYTES:
        return f"nobody uses it: {used / 2**20:.0f} MiB are in use"
    return ""
