"""One fleet a GPU: of two that lease the same one, neither knows what the other holds there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace_servicekit.lease.devices import detect_devices, full_names, gpu_uuids
from headrace_servicekit.rpc.errors import ServiceError

from headrace_cli.errors import user_error
from headrace_cli.launcher.data_dir import own
from headrace_cli.launcher.state import FleetLock


class GpuLocks:
    """This user's locks on the GPUs among `devices` (none: all that there are), for the fleet of a data directory."""

    def __init__(self, devices: Sequence[str], fleet: Path, folder: Path | None = None) -> None:
        self._devices, self._fleet = devices, fleet
        self._folder = folder or Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-gpus"
        self._held: list[FleetLock] = []

    def acquire(self) -> None:
        """Takes all or none. Raises CommandError (exit code 2) naming the GPU and the fleet that has it."""
        try:
            uuids = gpu_uuids(full_names(self._devices) if self._devices else detect_devices())
        except ServiceError as error:
            raise user_error("--devices", error.message, "name others, or leave it out") from error
        if uuids:
            own(self._folder)
        for uuid in uuids:
            lock, owner = FleetLock(self._folder / uuid), self._folder / f"{uuid}.fleet"
            if not lock.acquire():
                self.release()
                whose = owner.read_text() if owner.exists() else "another data directory"
                problem = f"{uuid} is in use by the fleet of {whose}, and two fleets cannot share a GPU"
                fix = "give each its own with --devices gpu:N, or end that one with headrace down"
                raise user_error("--devices", problem, fix)
            self._held.append(lock)
            owner.write_text(str(self._fleet))

    def release(self) -> None:
        """Releases what is held."""
        for lock in self._held:
            lock.release()
        self._held = []
