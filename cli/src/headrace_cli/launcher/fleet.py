"""The launcher: starts the store, the coordinator and the instances, keeps them alive, and takes them along when it ends.

Decides nothing about runs: what dies is started again, and the coordinator sorts out what that means.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.instances import Instances
from headrace_cli.launcher.kept_process import KeptProcess
from headrace_cli.launcher.plan import FleetPlan, Wiring, host_name, local_devices
from headrace_cli.launcher.ports import LOOPBACK, free_port
from headrace_cli.launcher.state import FleetLock, FleetState, ProcessState
from headrace_cli.launcher.stop import sweep
from headrace_cli.launcher.store import store_command, store_url, wait_for_store
from headrace_cli.launcher.tether import child_environment

COORDINATOR_GRACE_S = 5.0
STORE_GRACE_S = 5.0
LOCK_PATIENCE_S = 1.0


class LocalFleet:
    """All processes of one data directory, from the lock to the last kill."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.data_dir = DataDir.at(plan.data_dir)
        self._lock = FleetLock(self.data_dir.lock_file)
        self._environment = child_environment(self.data_dir.fleet_id)

    async def run(self) -> int:
        """Runs the fleet until SIGTERM or SIGINT; returns the exit status."""
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        if not await self._take_lock():
            print(f"a fleet already runs on {self.data_dir.root}", flush=True)
            return 2
        sweep(self.data_dir)
        self._prepare()
        try:
            await self._start()
            await stop.wait()
        finally:
            await self._stop()
        return 0

    async def _take_lock(self) -> bool:
        give_up_at = time.monotonic() + LOCK_PATIENCE_S  # `status` and `down` hold it for an instant
        while not self._lock.acquire():
            if time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(0.05)
        return True

    def _prepare(self) -> None:
        shared_memory = self.data_dir.make_shared_memory()
        self._socket = self.data_dir.socket_path(shared_memory)
        self._own_store = "HEADRACE_REDIS_URL" not in os.environ
        redis_url = store_url(self._socket) if self._own_store else os.environ["HEADRACE_REDIS_URL"]
        grpc_address = f"{LOOPBACK}:{free_port()}"
        devices = self.plan.devices or local_devices()
        token_file = self.data_dir.make_token()
        root = self.data_dir.root
        self._wiring = Wiring(grpc_address, host_name(), devices, token_file, shared_memory, root)
        self._state = FleetState(
            launcher_pid=os.getpid(),
            phase="starting",
            url=f"http://{LOOPBACK}:{self.plan.port}",
            grpc_address=grpc_address,
            token_file=str(token_file),
            shared_memory=str(shared_memory),
            redis_url=redis_url,
            started_at=time.time(),
            expected=self.plan.instance_names,
        )
        self._store = self._kept("store", store_command(self.data_dir.store, self._socket)) if self._own_store else None
        self._coordinator = self._kept("coordinator", self._wiring.coordinator_command(self.plan.port, redis_url))
        self._instances = Instances(self._wiring, self.plan.counts, self.data_dir, self._environment, self._changed)
        self._state.write(self.data_dir)

    def _kept(self, name: str, command: list[str]) -> KeptProcess:
        return KeptProcess(name, command, self.data_dir.log_file(name), self._environment, self._changed)

    async def _start(self) -> None:
        """Instances start at once and register when the coordinator is there: their imports take the longest."""
        await self._instances.start()
        if self._store:
            await self._store.start()
            await wait_for_store(self._socket)
        await self._coordinator.start()
        self._state.phase = "running"
        self._changed()

    async def _stop(self) -> None:
        """The coordinator goes first, so that it sees no instance die and its runs stay as they are."""
        self._state.phase = "stopping"
        self._changed()
        await self._coordinator.stop(COORDINATOR_GRACE_S)
        await self._instances.stop()
        if self._store:
            await self._store.stop(STORE_GRACE_S)
        sweep(self.data_dir)
        self._lock.release()

    def _changed(self) -> None:
        kept = [process for process in (self._store, self._coordinator) if process and process.pid]
        own = [ProcessState(process.name, process.name, process.pid, process.restarts) for process in kept]
        self._state.processes = own + self._instances.processes()
        self._state.write(self.data_dir)


def serve(plan: FleetPlan) -> int:
    """Runs a fleet in this process; returns its exit status."""
    Path(plan.data_dir).mkdir(parents=True, exist_ok=True)
    return asyncio.run(LocalFleet(plan).run())
