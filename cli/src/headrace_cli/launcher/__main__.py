"""The launcher, `python -m headrace_cli.launcher PLAN_JSON`: starts store, coordinator and instances, restarts what
dies, and stops them when it ends. `headrace up` starts it. Knows no run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from headrace_servicekit.descriptors import raise_limit
from headrace_servicekit.instance_config import make_token
from headrace_servicekit.logs import configure_logging, get_logger
from headrace_servicekit.process.supervisor import Supervisor
from headrace_servicekit.rpc.addresses import host_port

from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.gpu_locks import GpuLocks
from headrace_cli.launcher.plan import KINDS, FleetPlan, Wiring
from headrace_cli.launcher.state import DEATHS_THAT_FAIL, FleetLock, FleetState, ProcessState
from headrace_cli.launcher.stop import (
    COORDINATOR_GRACE_S,
    INSTANCES_GRACE_S,
    STORE_GRACE_S,
    TRAINERS_GRACE_S,
    sweep,
)
from headrace_cli.launcher.store import store_command, store_url, wait_for_store
from headrace_cli.launcher.tether import child_environment

LOCK_PATIENCE_S = 1.0
STATE_S = 0.2
_logger = get_logger(__name__)


class LocalFleet:
    """All processes of one data directory, from the lock to the last kill."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.data_dir = DataDir.at(plan.data_dir)
        self._lock = FleetLock(self.data_dir.lock_file)
        self._gpus = GpuLocks(plan.devices, self.data_dir.root)
        self._store: Supervisor | None = None
        self._coordinator: Supervisor | None = None
        self._written: dict[str, object] = {}

    async def run(self) -> int:
        """Runs the fleet until SIGTERM or SIGINT; returns the exit status."""
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        if not await self._take_lock():
            print(f"a fleet already runs on {self.data_dir.root}", flush=True)
            return 2
        try:
            self._gpus.acquire()
        except CommandError as error:
            print(error, flush=True)
            return 2
        sweep(self.data_dir)
        self._prepare()
        certified = asyncio.create_task(self._keep_certified())
        try:
            await self._start()
            while not stop.is_set():
                self._write_state()
                await _wait(stop, STATE_S)
        finally:
            certified.cancel()
            await self._stop()
        return 0

    async def _keep_certified(self) -> None:
        if self.plan.certificates == "made":
            from headrace_cli.launcher.encryption import keep_certified  # gRPC comes with it

            await keep_certified(self.data_dir, self.plan)

    async def _take_lock(self) -> bool:
        deadline = time.monotonic() + LOCK_PATIENCE_S  # `status` and `down` hold it for an instant
        while not self._lock.acquire():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _prepare(self) -> None:
        data_dir = self.data_dir
        raise_limit()  # The store, which is no service of ours, has it from here.
        os.environ.update(child_environment(data_dir.fleet_id))
        shared_memory = data_dir.make_shared_memory()
        self._socket = data_dir.socket_path(shared_memory)
        plan, redis_url = self.plan, os.environ.get("HEADRACE_REDIS_URL", "")
        if plan.certificates:
            # Of the launcher; a child has that of its kind beside it.
            os.environ["HEADRACE_TLS_DIR"] = str(data_dir.certificates / "supervisor")
            os.environ["HEADRACE_ENCRYPT_ALL"] = "1" if plan.tls else ""
        if plan.head is not None:
            token_file, http_token_file = Path(plan.head.token_file), None
        else:
            token_file = make_token(data_dir.token_file)
            http_token_file = None if plan.no_token else make_token(data_dir.http_token_file)
        if plan.certificates:
            token_file = _services_token(token_file, data_dir.services_token_file)
        wiring = Wiring(
            plan=plan,
            coordinator=plan.head.grpc_address
            if plan.head
            else host_port(plan.listen, plan.choose_grpc_port()),
            token_file=token_file,
            http_token_file=http_token_file,
            shared_memory=shared_memory,
            data_dir=data_dir.root,
        )
        if plan.head is None:
            if not redis_url:
                self._store = self._alone("store", store_command(data_dir.store, self._socket))
                redis_url = store_url(self._socket)
            self._coordinator = self._alone("coordinator", wiring.coordinator_command(redis_url))
        self._instances = self._supervised(wiring)
        self._state = self._describe(wiring, redis_url)

    def _alone(self, name: str, command: list[str]) -> Supervisor:
        """Keeps one process that the coordinator does not hear of."""
        self.data_dir.set_big_log_aside(name)
        supervisor = Supervisor(
            "",
            "",
            None,
            lambda kind, index, incarnation: command,
            self.data_dir.logs,
            name=lambda kind, index: kind,
        )
        supervisor.set_count(name, 1)
        return supervisor

    def _supervised(self, wiring: Wiring) -> Supervisor:
        token = wiring.token_file.read_text(encoding="ascii").strip()
        supervisor = Supervisor(
            self.plan.host,
            wiring.coordinator,
            token,
            wiring.instance_command,
            self.data_dir.logs,
            name=self.plan.instance_name,
            scalable_kinds=KINDS,
            starts_at_once=len(os.sched_getaffinity(0)),
        )
        for kind, count in self.plan.counts.items():
            supervisor.set_count(kind, count)
        return supervisor

    def _describe(self, wiring: Wiring, redis_url: str) -> FleetState:
        return FleetState(
            launcher_pid=os.getpid(),
            phase="starting",
            url=self.plan.url,
            grpc_address=wiring.coordinator,
            token_file=str(wiring.http_token_file or ""),
            shared_memory=str(wiring.shared_memory),
            redis_url=redis_url,
            started_at=time.time(),
            expected=self.plan.instance_names,
        )

    async def _start(self) -> None:
        """Instances start at once and register when the coordinator is there: their imports take longest."""
        await self._instances.start()
        if self._store:
            await self._store.start()
            try:
                await wait_for_store(self._socket, ended=self._store_ends)
            except TimeoutError as error:
                raise CommandError(
                    f"the store does not start; see {self.data_dir.log_file('store')}"
                ) from error
        if self._coordinator:
            await self._coordinator.start()
        self._state.phase = "running"

    def _store_ends(self) -> bool:
        """Whether the store has ended again and again: as when it does not take its own files."""
        return self._store is not None and self._store.processes()[0].restarts >= DEATHS_THAT_FAIL

    async def _stop(self) -> None:
        """Trainers first: they save a checkpoint, with the coordinator and the others still there.

        Then the other instances, the coordinator, and last the store that it writes to.
        """
        await self._stopping("the trainers", TRAINERS_GRACE_S, partial(self._instances.stop_kind, "trainer"))
        await self._stopping("the other instances", INSTANCES_GRACE_S, self._instances.stop)
        if self._coordinator:
            await self._stopping("the coordinator", COORDINATOR_GRACE_S, self._coordinator.stop)
        if self._store:
            await self._stopping("the store", STORE_GRACE_S, self._store.stop)
        sweep(self.data_dir)
        self._gpus.release()
        self._lock.release()

    async def _stopping(self, what: str, grace_s: float, stop: Callable[[float], Awaitable[object]]) -> None:
        self._state.phase = f"stopping {what}, at most {grace_s:g} s"
        self._write_state()
        _logger.info("stopping", extra={"what": what, "grace_s": grace_s})
        await stop(grace_s)

    def _write_state(self) -> None:
        """Puts the processes of now into the state file, if they are others than before."""
        supervisors = [item for item in (self._store, self._coordinator, self._instances) if item]
        self._state.processes = [
            ProcessState(item.instance, item.kind, item.pid, item.restarts)
            for supervisor in supervisors
            for item in supervisor.processes()
        ]
        self._state.templates = self._instances.templates()
        self._state.away, self._state.refusal = self._instances.away, self._instances.refusal
        written = asdict(self._state)
        if written == self._written:
            return
        try:
            self._state.write(self.data_dir)
            self._written = written
        except OSError as error:  # a full disk is no reason to take the fleet down
            print(f"the state file cannot be written: {error}", flush=True)


def _services_token(secret: Path, file: Path) -> Path:
    from headrace_servicekit.rpc.joining import services_token  # takes `cryptography` along

    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
        out.write(services_token(secret.read_text(encoding="ascii").strip()))
    return file


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def serve(plan: FleetPlan) -> int:
    """Runs a fleet in this process; returns its exit status."""
    Path(plan.data_dir).mkdir(parents=True, exist_ok=True)
    configure_logging("info", instance="launcher")
    return asyncio.run(LocalFleet(plan).run())


def main() -> int:
    """Runs the fleet that the only argument describes."""
    try:
        return serve(FleetPlan.from_json(sys.argv[1]))
    except CommandError as error:
        print(error.message, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
