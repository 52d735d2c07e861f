"""An instance's session with the coordinator: Register, then a stream of heartbeats up and lease commands down.

Connects again, with backoff, after a lost stream or a coordinator's restart. Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace_schema.progress import counter

from headrace_servicekit.lease import leases
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.lease.holder import LeaseHolder
from headrace_servicekit.lease.usage import Usage
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tls import COORDINATOR_NAME

REGISTER_TIMEOUT_S = 10.0
MAX_BACKOFF_S = 3.0
_FIRST_BACKOFF_S = 0.2
_logger = get_logger(__name__)
_Call = grpc.aio.StreamStreamCall[fleet_pb2.SessionRequest, fleet_pb2.SessionResponse]


@dataclass
class SessionHooks:
    """What a session asks of its instance."""

    registration: Callable[[], fleet_pb2.RegisterRequest]
    take_metrics: Callable[[], list[common_pb2.StageMetrics]]
    usage: Usage
    on_drain: Callable[[float], None]
    open_runs: Callable[[], list[common_pb2.OpenRunReport]]
    lost_peers: Callable[[], list[str]] = list


class SessionLost(Exception):
    """The stream ended or fell silent."""


class Session:
    """Keeps one instance registered at the coordinator at `address` until its task is cancelled."""

    def __init__(
        self,
        address: str,
        token: str | None,
        holder: LeaseHolder,
        fence: Fence,
        hooks: SessionHooks,
        now: Callable[[], float],
    ) -> None:
        self._address = address
        self._token = token
        self._holder = holder
        self._fence = fence
        self._hooks = hooks
        self._now = now
        self._acked_at = 0.0
        self._beat_now = False
        self.connected = asyncio.Event()

    async def run(self) -> None:
        """Connects again and again; returns only by cancellation."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                await self._connect_once()
            except (grpc.aio.AioRpcError, ServiceError, SessionLost) as error:
                if self.connected.is_set():
                    backoff = _FIRST_BACKOFF_S
                self.connected.clear()
                _logger.warning(
                    "no session with the coordinator",
                    extra={
                        "coordinator": self._address,
                        "why": message_of(error),
                        "again_in_s": round(backoff, 1),
                    },
                )
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    def beat_now(self) -> None:
        """Sends a heartbeat at once; its ack proves that what was sent before has arrived."""
        self._beat_now = True
        self._holder.wake.set()

    async def _connect_once(self) -> None:
        async with dial(self._address, token=self._token, name=COORDINATOR_NAME) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call]
            sent_at = self._now()
            response = await stub.Register(self._hooks.registration(), timeout=REGISTER_TIMEOUT_S)
            self._fence.obey(response.coordinator_epoch, response.store_id)
            ttl_s = _seconds(response.lease_ttl) or 30.0
            stale = tuple(response.stale_lease_epochs)
            self._holder.handle(leases.SessionOpened(sent_at, ttl_s, stale))
            self._holder.resend()
            call = stub.Session()
            try:
                await self._exchange(call, _seconds(response.heartbeat_interval) or 5.0)
            finally:
                call.cancel()

    async def _exchange(self, call: _Call, interval_s: float) -> None:
        self._acked_at = self._now()
        both = {asyncio.ensure_future(self._read(call)), asyncio.ensure_future(self._write(call, interval_s))}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _write(self, call: _Call, interval_s: float) -> None:
        """Heartbeats every `interval_s`, other messages at once; raises SessionLost without acks."""
        sequence, next_beat = 1, self._now()
        while True:
            self._holder.wake.clear()
            for message in self._holder.unsent(sequence):
                await call.write(message)
            now = self._now()
            if now >= next_beat or self._beat_now:
                self._beat_now = False
                if now - self._acked_at > max(3 * interval_s, 1.0):
                    raise SessionLost(f"no heartbeat was acknowledged for {now - self._acked_at:.1f} s")
                self._holder.handle(leases.HeartbeatSent(sequence, now))
                await call.write(self._heartbeat(sequence))
                sequence, next_beat = sequence + 1, now + interval_s
            try:
                async with asyncio.timeout(max(0.0, next_beat - self._now())):
                    await self._holder.wake.wait()
            except TimeoutError:
                pass

    def _heartbeat(self, sequence: int) -> fleet_pb2.SessionRequest:
        registration, usage = self._hooks.registration(), self._hooks.usage
        beat = fleet_pb2.Heartbeat(
            sequence=sequence,
            lease_epochs=self._holder.state.epochs(),
            resident_memory_bytes=usage.resident_bytes(),
            busy_cores=usage.cores(),
            gpus=[
                fleet_pb2.GpuUse(device=name, busy=use.busy, used_memory_bytes=use.used_memory_bytes)
                for name, use in usage.gpus().items()
            ],
            metrics=self._hooks.take_metrics(),
            open_runs=self._hooks.open_runs(),
            lost_peers=self._hooks.lost_peers(),
        )
        if (progress := counter().read()) is not None:
            beat.progress.CopyFrom(fleet_pb2.Progress(**progress._asdict()))
        return fleet_pb2.SessionRequest(incarnation=registration.incarnation, heartbeat=beat)

    async def _read(self, call: _Call) -> None:
        async for response in call:
            self._obey(response)
        raise SessionLost("the coordinator ended the session")

    def _obey(self, response: fleet_pb2.SessionResponse) -> None:
        match response.WhichOneof("command"):
            case "heartbeat_ack":
                ack, self._acked_at = response.heartbeat_ack, self._now()
                self.connected.set()
                self._holder.arrived(ack.sequence)
                self._hooks.usage.measured = tuple(ack.measured_devices)
                renewed, stale = tuple(ack.renewed_epochs), tuple(ack.stale_epochs)
                self._holder.handle(leases.HeartbeatAcked(ack.sequence, self._acked_at, renewed, stale))
            case "grant":
                self._holder.handle(leases.Granted(response.grant.lease))
            case "revoke":
                revoke = response.revoke
                self._holder.handle(
                    leases.Revoked(revoke.epoch, _seconds(revoke.notice), keep=revoke.keep_memory)
                )
            case "drain":
                self._hooks.on_drain(_seconds(response.drain.grace))
            case None:
                pass


def _seconds(duration: object) -> float:
    nanoseconds = getattr(duration, "ToNanoseconds", None)
    return float(nanoseconds()) / 1e9 if callable(nanoseconds) else 0.0
