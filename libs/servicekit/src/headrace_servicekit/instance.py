"""One instance of a service: server, session, fence, weights, orderly end. Knows nothing of its work."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import psutil
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2

from headrace_servicekit.instance_config import KINDS, InstanceConfig, parse_instance_config
from headrace_servicekit.lease.clock import boottime
from headrace_servicekit.lease.devices import boot_id
from headrace_servicekit.lease.fence import Fence, opening_refusals
from headrace_servicekit.lease.gpus import GPU_MEMORY, WEIGHTS_MEMORY, gpu_memory
from headrace_servicekit.lease.holder import LeaseCallbacks, LeaseHolder
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.lease.open_runs import Build, End, OpenRuns
from headrace_servicekit.lease.session import Session, SessionHooks
from headrace_servicekit.lease.usage import Usage, gpu_use
from headrace_servicekit.logs import configure_logging, get_logger, log_context
from headrace_servicekit.memory.segments import filesystem_bytes
from headrace_servicekit.process.worker import hide_from_workers
from headrace_servicekit.rpc.addresses import LOOPBACK, advertised_host, host_port, split_address
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.metrics import CHECKPOINTS, WEIGHTS, watch
from headrace_servicekit.rpc.relay import Relay
from headrace_servicekit.rpc.requests import check_name
from headrace_servicekit.rpc.server import AddServicer, GrpcServer
from headrace_servicekit.rpc.tls import check_listen, keys_folder, tls_dir
from headrace_servicekit.weights.store import WeightStore

__all__ = ["Instance", "InstanceConfig", "parse_instance_config"]

GRACE_S = 10.0
_FLUSH_S = 2.0
_MAX_METRICS = 1000


class Instance:
    """A running service process, or one of several in a process.

    Set the callbacks before `start`:
    `on_grant(lease)` takes the resources (raise ServiceError to refuse); `on_revoke(epoch, notice_s, keep)` reaches
    a safe point, gives them back (where `keep` is true what is loaded may stay) and returns the memory measured then;
    `on_quiesce(epoch)` hears that a lease was not renewed in time; `on_drain(grace_s)` finishes the work.
    """

    def __init__(self, config: InstanceConfig) -> None:
        self.config = config
        self.open_runs = OpenRuns(on_change=self._beat_now)
        self.fence = Fence(open_runs=self.open_runs)
        self.log: logging.Logger = get_logger(f"headrace.{config.kind}")
        self.capabilities: dict[str, list[str]] = {}
        if sizes := gpu_memory(config.devices):
            self.capabilities[GPU_MEMORY] = sizes
        if room := filesystem_bytes(config.shm_dir):
            self.capabilities[WEIGHTS_MEMORY] = [str(room)]
        self.on_grant: Callable[[common_pb2.Lease], Awaitable[None]] = _nothing
        self.on_revoke: Callable[[int, float, bool], Awaitable[Memory]] = _host_memory
        self.on_quiesce: Callable[[int], Awaitable[None]] = _nothing
        self.on_drain: Callable[[float], Awaitable[None]] = _nothing
        self.address = ""
        self.drained = asyncio.Event()
        self.lost_peers: set[str] = set()
        """Incarnations of instances that this one works with and has lost; each heartbeat says so."""
        self.failure = ""
        self.token = config.read_token()
        check_listen(config.listen, self.token)  # before the service imports what takes seconds
        own = (config.token_file, config.data_dir, config.shm_dir, tls_dir(), keys_folder())
        writes, publishes = config.kind == "trainer", config.kind in ("trainer", "rollout")
        watch(
            {CHECKPOINTS: config.data_dir if writes else None, WEIGHTS: config.shm_dir if publishes else None}
        )
        hide_from_workers(*(path for path in own if path is not None))
        self._weights: WeightStore | None = None
        self._services: list[tuple[AddServicer, Any, str]] = []
        self._metrics: deque[common_pb2.StageMetrics] = deque(maxlen=_MAX_METRICS)
        self._server: GrpcServer | None = None
        self._session: Session | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_call: asyncio.TimerHandle | None = None
        self._drains = False
        self._holder = LeaseHolder(config.incarnation, self.fence, boottime, self._callbacks, self._fail)
        self._usage = Usage(self._devices, gpu_use)

    @property
    def weights(self) -> WeightStore:
        """This instance's weight store, made on first use."""
        if self._weights is None:
            self._weights = WeightStore(self.config.shm_dir, self.config.incarnation, self.address)
            self._weights.listen, _ = split_address(self.config.listen)
        return self._weights

    def add_service(self, add_to_server: AddServicer, servicer: Any, full_name: str) -> None:
        """Mounts a servicer: the generated function, the servicer, and "headrace.reward.v1.RewardService"."""
        self._services.append((add_to_server, servicer, full_name))

    async def open_run(self, header: common_pb2.CommandHeader, config: object, build: Build, end: End) -> Any:
        """Obeys an OpenRun; see `OpenRuns.open`.

        Raises ServiceError EPOCH_STALE, DRAINING after SIGTERM or a Drain, and that method's reasons.
        """
        self.fence.check(header, lease=False, opening=False)
        if self._last_call is not None or self._drains:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "DRAINING",
                f"{self.config.name} was told to stop and opens no run",
            )
        with opening_refusals():
            return await self.open_runs.open(header, config, build, end)

    async def close_run(self, header: common_pb2.CommandHeader) -> None:
        """Obeys a CloseRun; see `OpenRuns.close`. Raises ServiceError EPOCH_STALE or INVALID."""
        self.fence.check(header, lease=False, opening=False)
        check_name("header.run", header.run, optional=True)
        await self.open_runs.close(header)

    def lost_peers_found(self, incarnations: set[str]) -> None:
        """Tells the coordinator at once of instances that were not heard: it decides whether they are dead."""
        self.lost_peers |= incarnations
        self._beat_now()

    def report(self, metrics: common_pb2.StageMetrics) -> None:
        """Sends figures with the next heartbeat; the oldest are dropped beyond 1,000 unsent ones."""
        self._metrics.append(metrics)

    async def start(self) -> str:
        """Listens, registers in the background, and returns the address others reach this instance at."""
        config = self.config
        with log_context(instance=config.name):
            self._server = GrpcServer(
                config.listen,
                token=self.token,
                instance=config.name,
                reflection=config.reflection,
                metrics_port=config.metrics_port,
                on_applied=self.open_runs.applied,
            )
            for add_to_server, servicer, full_name in self._services:
                self._server.add_service(add_to_server, servicer, full_name)
            _, port = split_address(await self._server.start())
            self.address = host_port(advertised_host(config.listen, config.advertise), port)
            if self._weights is not None:
                self._weights.address = self.address
            self.log.info("listening", extra={"address": self.address, "incarnation": config.incarnation})
            if config.outgoing and config.coordinator:
                relay = Relay(config.coordinator, self.token, host_port(LOOPBACK, port))
                self._tasks.append(asyncio.create_task(relay.run(self._reached_at), name="relay"))
            elif config.coordinator:
                self._open_session()
        return self.address

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Releases all leases and says so, finishes calls in flight, and removes shared files."""
        if self._last_call is not None:
            self._last_call.cancel()
        await self._holder.release_all(grace_s)
        await self._flush()
        if self._server is not None:
            await self._server.drain(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    async def run(self) -> None:
        """Starts, waits for SIGTERM, SIGINT or a drain, stops. Raises RuntimeError when a lease got stuck."""
        if not logging.getLogger().handlers:
            configure_logging(self.config.log_level, instance=self.config.name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.terminate)
        await self.start()
        await self.drained.wait()
        await self.stop()
        if self.failure:
            raise RuntimeError(self.failure)

    def terminate(self) -> None:
        """Obeys SIGTERM: asks the coordinator to close the open runs, and drains at its Drain or after a grace.

        Drains at once where nothing is open, without a session, and when called a second time.
        """
        connected = self._session is not None and self._session.connected.is_set()
        if self._last_call is not None or not self.open_runs.names() or not connected:
            self.drain(GRACE_S)
            return
        grace_s = self.config.drain_grace_s
        self.log.info("asked to stop", extra={"open_runs": self.open_runs.names(), "grace_s": grace_s})
        told = fleet_pb2.Draining()
        told.grace.FromNanoseconds(int(grace_s * 1e9))
        self._holder.tell(fleet_pb2.SessionRequest(draining=told))
        self._last_call = asyncio.get_running_loop().call_later(grace_s, self.drain, GRACE_S)

    def drain(self, grace_s: float) -> None:
        """Finishes the work within `grace_s` seconds and then sets `drained`; repeated calls do nothing."""
        if not self._drains:
            self._drains = True
            self._tasks.append(asyncio.create_task(self._drain(grace_s), name="drain"))

    async def _drain(self, grace_s: float) -> None:
        self.log.info("draining", extra={"grace_s": grace_s})
        try:
            async with asyncio.timeout(grace_s):
                await self.on_drain(grace_s)
        except TimeoutError:
            self.log.warning("on_drain did not end within its grace", extra={"grace_s": grace_s})
        finally:
            self.drained.set()

    def _reached_at(self, address: str) -> None:
        """Hears where the coordinator listens for this instance: others know it by that address."""
        if self._session is None:
            self.address = address
            if self._weights is not None:
                self._weights.address = address
            self._open_session()
        elif address != self.address:
            self._fail(f"it was reached at {self.address}, which another program has now; it starts anew")

    def _open_session(self) -> None:
        hooks = SessionHooks(
            self._registration,
            self._take_metrics,
            self._usage,
            self.drain,
            self.open_runs.reports,
            lambda: sorted(self.lost_peers),
        )
        self._session = Session(
            self.config.coordinator, self.token, self._holder, self.fence, hooks, boottime
        )
        self._tasks += [
            asyncio.create_task(self._session.run(), name="session"),
            asyncio.create_task(self._holder.watch_deadlines(), name="lease deadlines"),
        ]

    async def _flush(self) -> None:
        """Gives the last LeaseReleased messages a moment to be acknowledged."""
        until = boottime() + _FLUSH_S
        while (
            self._session
            and self._session.connected.is_set()
            and not self._holder.flushed()
            and boottime() < until
        ):
            self._session.beat_now()
            await asyncio.sleep(0.05)

    def _registration(self) -> fleet_pb2.RegisterRequest:
        config = self.config
        capabilities = {key: fleet_pb2.StringList(values=values) for key, values in self.capabilities.items()}
        return fleet_pb2.RegisterRequest(
            instance=config.name,
            incarnation=config.incarnation,
            kind=KINDS[config.kind],
            address=self.address,
            host=config.host,
            devices=config.devices,
            capabilities=capabilities,
            held_leases=self._holder.state.held(),
            coordinator_epoch=self.fence.coordinator_epoch,
            open_runs=self.open_runs.names(),
            open_run_reports=self.open_runs.reports(),
            max_open_runs=self.open_runs.limit,
            store_id=self.fence.store_id,
            boot_id=boot_id(),
        )

    def _beat_now(self) -> None:
        if self._session is not None:
            self._session.beat_now()

    def _take_metrics(self) -> list[common_pb2.StageMetrics]:
        taken = list(self._metrics)
        self._metrics.clear()
        return taken

    def _devices(self) -> list[str]:
        return [device for lease in self._holder.state.held() for device in lease.devices]

    def _callbacks(self) -> LeaseCallbacks:
        return LeaseCallbacks(self.on_grant, self.on_revoke, self.on_quiesce)

    def _fail(self, why: str) -> None:
        self.failure = why
        self.drain(0.0)


async def _nothing(_: object) -> None:
    return None


def host_memory() -> Memory:
    """Memory of this host that is available, and this process's resident set."""
    return Memory(int(psutil.virtual_memory().available), int(psutil.Process().memory_info().rss))


async def _host_memory(epoch: int, notice_s: float, keep: bool) -> Memory:
    return host_memory()
