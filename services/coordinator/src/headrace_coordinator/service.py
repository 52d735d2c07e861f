"""FleetService over gRPC: messages in, fleet calls; commands out, messages. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from headrace.coordinator.v1 import fleet_pb2 as pb
from headrace.coordinator.v1 import fleet_pb2_grpc
from headrace_servicekit.errors import ServiceError

from headrace_coordinator.domain.events import LeaseGranted
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet import Fleet, ForeignInstance, Supervisor, open_reports
from headrace_coordinator.kernel import HIGHEST_EPOCH

log = logging.getLogger(__name__)
KINDS = {
    pb.SERVICE_KIND_ROLLOUT: "rollout",
    pb.SERVICE_KIND_TRAINER: "trainer",
    pb.SERVICE_KIND_SIMULATOR: "simulator",
    pb.SERVICE_KIND_REWARD: "reward",
}
NUMBERS = {name: number for number, name in KINDS.items()}
Result = Callable[[str, str], None]


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The fleet's side of every lifeline."""

    def __init__(self, fleet: Fleet, on_scaled: Result) -> None:
        self._fleet = fleet
        self._on_scaled = on_scaled

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """See the contract."""
        if request.kind not in KINDS or not request.instance or not request.incarnation:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "Register needs instance, incarnation and kind"
            )
        if not 0 <= request.coordinator_epoch < HIGHEST_EPOCH:
            message = (
                f"coordinator_epoch {request.coordinator_epoch}: no coordinator has it; use one below 2^62"
            )
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)
        state = InstanceState(
            instance=request.instance,
            incarnation=request.incarnation,
            kind=KINDS[request.kind],
            host=request.host,
            address=request.address,
            devices=list(request.devices),
            capabilities={facet: list(names.values) for facet, names in request.capabilities.items()},
        )
        held = [lease.epoch for lease in request.held_leases]
        try:
            stale = await self._fleet.register(state, held, request.coordinator_epoch, request.store_id)
        except ForeignInstance as error:
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "FOREIGN_STORE", str(error)) from error
        self._fleet.reported(request.incarnation, open_reports(request.open_run_reports))
        durable = self._fleet.kernel.state
        response = pb.RegisterResponse(
            coordinator_epoch=durable.epoch, stale_lease_epochs=stale, store_id=durable.store_id
        )
        response.heartbeat_interval.FromMilliseconds(int(self._fleet.settings.heartbeat * 1000))
        response.lease_ttl.FromMilliseconds(int(self._fleet.settings.lease_ttl * 1000))
        return response

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        """See the contract."""
        outbox: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        first = await anext(aiter(request_iterator))
        if first.incarnation not in self._fleet.kernel.state.instances:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "register before opening a session")

        def send(command: str, body: Any) -> None:
            outbox.put_nowait(_session_command(command, body))

        self._fleet.attach(first.incarnation, send)
        self._hear(first, outbox)
        try:
            async with _pump(request_iterator, lambda message: self._hear(message, outbox), outbox):
                while (message := await outbox.get()) is not None:
                    yield message
        finally:
            self._fleet.detach(first.incarnation, send)

    def _hear(self, message: pb.SessionRequest, outbox: asyncio.Queue[pb.SessionResponse | None]) -> None:
        match message.WhichOneof("event"):
            case "heartbeat":
                beat = message.heartbeat
                renewed, stale = self._fleet.heartbeat(
                    message.incarnation, beat.lease_epochs, beat.resident_memory_bytes
                )
                self._fleet.reported(message.incarnation, open_reports(beat.open_runs))
                ack = pb.HeartbeatAck(sequence=beat.sequence, renewed_epochs=renewed, stale_epochs=stale)
                outbox.put_nowait(pb.SessionResponse(heartbeat_ack=ack))
            case "lease_held":
                self._fleet.desk.held(
                    message.incarnation, message.lease_held.epoch, message.lease_held.refusal
                )
            case "lease_released":
                released = message.lease_released
                self._fleet.desk.released(message.incarnation, released.epoch, released.used_memory_bytes)
            case "draining":
                self._fleet.draining(message.incarnation, message.draining.grace.ToNanoseconds() / 1e9)

    async def Supervise(
        self, request_iterator: AsyncIterator[pb.SuperviseRequest], context: Any
    ) -> AsyncIterator[pb.SuperviseResponse]:
        """See the contract."""
        outbox: asyncio.Queue[pb.SuperviseResponse | None] = asyncio.Queue()

        def send(command: str, body: Any) -> None:
            outbox.put_nowait(_supervisor_command(command, body))

        mine: list[Supervisor] = []

        def hear(message: pb.SuperviseRequest) -> None:
            self._hear_supervisor(message, send, mine)

        try:
            async with _pump(request_iterator, hear, outbox):
                while (command := await outbox.get()) is not None:
                    yield command
        finally:
            if mine and self._fleet.supervisors.get(mine[-1].host) is mine[-1]:
                del self._fleet.supervisors[mine[-1].host]

    def _hear_supervisor(
        self, message: pb.SuperviseRequest, send: Callable[[str, Any], None], mine: list[Supervisor]
    ) -> None:
        match message.WhichOneof("event"):
            case "processes":
                table = message.processes
                supervisor = Supervisor(
                    host=message.host,
                    send=send,
                    scalable=frozenset(KINDS[kind] for kind in table.scalable_kinds if kind in KINDS),
                    incarnations=frozenset(process.incarnation for process in table.processes),
                )
                mine.append(supervisor)
                self._fleet.supervised(supervisor)
            case "exit":
                words = message.exit.last_words.strip().splitlines()[-1:] or ["no last words"]
                reason = f"exited with {message.exit.exit_status}: {words[0]}"
                if (
                    message.exit.incarnation in self._fleet.names
                ):  # A reconnecting supervisor repeats old ends.
                    log.warning("%s %s", message.exit.instance, reason)
                self._fleet.exited(message.exit.incarnation, reason)
            case "scale_result":
                result = message.scale_result
                self._on_scaled(result.request_id, result.error)


def _session_command(command: str, body: Any) -> pb.SessionResponse:
    if command == "grant":
        return pb.SessionResponse(grant=_grant(body))
    if command == "revoke":
        revoke = pb.Revoke(epoch=body[0])
        revoke.notice.FromMilliseconds(int(body[1] * 1000))
        return pb.SessionResponse(revoke=revoke)
    drain = pb.Drain()
    drain.grace.FromMilliseconds(int(body * 1000))
    return pb.SessionResponse(drain=drain)


def _grant(event: LeaseGranted) -> pb.Grant:
    grant = pb.Grant()
    grant.lease.epoch, grant.lease.run, grant.lease.stage = event.epoch, f"runs/{event.run}", event.stage
    grant.lease.devices.extend(event.devices)
    return grant


def _supervisor_command(command: str, body: Any) -> pb.SuperviseResponse:
    if command == "kill":
        instance, incarnation, reason = body
        return pb.SuperviseResponse(kill=pb.Kill(instance=instance, incarnation=incarnation, reason=reason))
    request_id, kind, count = body
    return pb.SuperviseResponse(scale=pb.Scale(request_id=request_id, kind=NUMBERS[kind], count=count))


@contextlib.asynccontextmanager
async def _pump(
    requests: AsyncIterator[Any], hear: Callable[[Any], None], outbox: asyncio.Queue[Any]
) -> AsyncIterator[None]:
    """Reads `requests` in the background; their end closes the outbox."""

    async def read() -> None:
        try:
            async for message in requests:
                hear(message)
        finally:
            outbox.put_nowait(None)

    task = asyncio.ensure_future(read())
    try:
        yield
        if task.done():
            await task  # What broke the reading is the call's error, not silence.
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
