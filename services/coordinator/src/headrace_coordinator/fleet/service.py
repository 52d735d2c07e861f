"""FleetService over gRPC: messages in, fleet calls; commands out, messages. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2 as pb
from headrace.coordinator.v1 import fleet_pb2_grpc
from headrace_schema.progress import Progress
from headrace_servicekit.contained.settings import FACET, TRUST_VARIABLE
from headrace_servicekit.instance_config import KINDS, kind_name
from headrace_servicekit.rpc.addresses import LOOPBACK, split_address
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.relay import listen_for
from headrace_servicekit.rpc.requests import (
    HIGHEST_COMMAND,
    HIGHEST_EPOCH,
    check_at_least,
    check_enum,
    check_name,
    check_number,
    check_seconds,
    invalid,
)
from headrace_servicekit.rpc.roles import INSTANCES, SCALER, Identity, caller, denied
from typing_extensions import override

from headrace_coordinator.domain.events import LeaseGranted
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import ForeignInstance, InstanceUsage, Supervisor, open_reports

log = logging.getLogger(__name__)
MAX_NAMES = 4096
MAX_WORD = 40
USERS_CODE = ("reward", "simulator")
"""Services whose children run users' code."""
MAX_CAPABILITY = 65_536
MAX_REASON = 500
Outbox = asyncio.Queue[pb.SessionResponse | ServiceError | None]
Result = Callable[[str, str], None]


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The coordinator's side of the sessions of instances and supervisors."""

    def __init__(
        self, fleet: Fleet, on_scaled: Result, *, contained: bool = False, host: str = LOOPBACK
    ) -> None:
        self._fleet = fleet
        self._on_scaled = on_scaled
        self._host = host
        """Address of this host at which it listens for instances that nobody reaches."""
        self._contained = contained
        """Whether services with users' code must have said that they contain it."""

    @override
    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        _check_registration(request)
        _check_speaks_for(caller(context), kind_name(request.kind), request.host)
        if self._contained and kind_name(request.kind) in USERS_CODE and FACET not in request.capabilities:
            refusal = (
                f"this fleet is contained, and {request.instance} at {request.host} does not contain users' code: "
                f"start it with --trust contained ({TRUST_VARIABLE}=contained)"
            )
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NOT_CONTAINED", refusal)
        # The store's epoch rises to it for good, so later coordinators need numbers above.
        most = max(HIGHEST_EPOCH // 2, self._fleet.event_log.state.epoch)
        check_number("coordinator_epoch", request.coordinator_epoch, most=most)
        state = InstanceState(
            instance=request.instance,
            incarnation=request.incarnation,
            kind=kind_name(request.kind),
            host=request.host,
            address=request.address,
            devices=list(request.devices),
            capabilities={facet: list(names.values) for facet, names in request.capabilities.items()},
            boot_id=request.boot_id,
        )
        held = [lease.epoch for lease in request.held_leases]
        try:
            stale = await self._fleet.register(state, held, request.coordinator_epoch, request.store_id)
        except ForeignInstance as error:
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "FOREIGN_STORE", str(error)) from error
        self._fleet.reported(request.incarnation, open_reports(request.open_run_reports))
        durable = self._fleet.event_log.state
        response = pb.RegisterResponse(
            coordinator_epoch=durable.epoch, stale_lease_epochs=stale, store_id=durable.store_id
        )
        response.heartbeat_interval.FromMilliseconds(int(self._fleet.settings.heartbeat * 1000))
        response.lease_ttl.FromMilliseconds(int(self._fleet.settings.lease_ttl * 1000))
        return response

    @override
    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        outbox: Outbox = asyncio.Queue()
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.incarnation:
            raise invalid("incarnation", "is missing; a session begins with the id that Register was given")
        if first.incarnation not in self._fleet.event_log.state.instances:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "register before opening a session")
        own = self._fleet.event_log.state.instances[first.incarnation]
        _check_speaks_for(caller(context), own.kind, own.host)

        def send(command: str, body: Any) -> None:
            outbox.put_nowait(_session_command(command, body))

        def hear(message: pb.SessionRequest) -> None:
            if message.incarnation != first.incarnation:
                raise invalid(
                    "incarnation", f"{message.incarnation!r}; this session is {first.incarnation}'s"
                )
            self._hear(message, outbox)

        self._fleet.attach(first.incarnation, send)
        try:
            self._hear(first, outbox)
            async with _pump(request_iterator, hear, outbox):
                while (message := await outbox.get()) is not None:
                    if isinstance(message, ServiceError):
                        raise message
                    yield message
        finally:
            self._fleet.detach(first.incarnation, send)

    def _hear(self, message: pb.SessionRequest, outbox: Outbox) -> None:
        match message.WhichOneof("event"):
            case "heartbeat":
                beat = message.heartbeat
                _check_reports("heartbeat.open_runs", beat.open_runs)
                renewed, stale = self._fleet.heartbeat(message.incarnation, beat.lease_epochs, _usage(beat))
                self._fleet.reported(message.incarnation, open_reports(beat.open_runs))
                self._fleet.suspected(message.incarnation, beat.lost_peers[:MAX_NAMES])
                ack = pb.HeartbeatAck(
                    sequence=beat.sequence,
                    renewed_epochs=renewed,
                    stale_epochs=stale,
                    measured_devices=self._fleet.quarantines.gpus_seen_by(message.incarnation),
                )
                outbox.put_nowait(pb.SessionResponse(heartbeat_ack=ack))
            case "lease_held":
                self._fleet.lease_manager.held(
                    message.incarnation, message.lease_held.epoch, message.lease_held.refusal
                )
            case "lease_released":
                released = message.lease_released
                self._fleet.lease_manager.released(
                    message.incarnation, released.epoch, released.used_memory_bytes
                )
            case "draining":
                grace_s = check_seconds("draining.grace", message.draining.grace)
                self._fleet.draining(message.incarnation, grace_s)

    @override
    async def Relay(
        self, request_iterator: AsyncIterator[pb.RelayRequest], context: Any
    ) -> AsyncIterator[pb.RelayResponse]:
        async with contextlib.aclosing(listen_for(request_iterator, self._host)) as responses:
            async for response in responses:
                yield response

    @override
    async def Supervise(
        self, request_iterator: AsyncIterator[pb.SuperviseRequest], context: Any
    ) -> AsyncIterator[pb.SuperviseResponse]:
        outbox: asyncio.Queue[pb.SuperviseResponse | ServiceError | None] = asyncio.Queue()

        def send(command: str, body: Any) -> None:
            outbox.put_nowait(_supervisor_command(command, body))

        mine: list[Supervisor] = []
        known = caller(context)

        def hear(message: pb.SuperviseRequest) -> None:
            check_name("host", message.host)
            self._check_supervisor(known, message)
            if mine and message.host != mine[0].host:
                raise invalid("host", f"{message.host!r}; this stream is {mine[0].host}'s")
            self._hear_supervisor(message, send, mine)

        try:
            async with _pump(request_iterator, hear, outbox):
                while (command := await outbox.get()) is not None:
                    if isinstance(command, ServiceError):
                        raise command
                    yield command
        finally:
            if mine and self._fleet.supervisors.get(mine[-1].host) is mine[-1]:
                del self._fleet.supervisors[mine[-1].host]

    def _check_supervisor(self, known: Identity | None, message: pb.SuperviseRequest) -> None:
        """Nobody speaks of processes of another host; only the scaler, which sees all, of hosts that are gone."""
        event = message.WhichOneof("event")
        told = (
            message.processes.processes if event == "processes" else [message.exit] if event == "exit" else ()
        )
        instances = self._fleet.event_log.state.instances
        for process in told:
            found = instances.get(process.incarnation)
            if found is not None and found.host != message.host:
                raise denied(
                    f"{process.incarnation} is a process of host {found.host!r}, not of {message.host!r}"
                )
            if found is not None and known is not None and known.role in INSTANCES:
                _check_speaks_for(known, found.kind, found.host)
        if known is None:
            return
        if not known.is_at(message.host):
            raise denied(f"{known.uri} does not speak for host {message.host!r}")
        if event == "hosts_gone" and known.role != SCALER:
            raise denied(f"{known.uri} says that hosts are gone, which is for the scaler's certificate")

    def _has_rival(self, supervisor: Supervisor) -> bool:
        """Whether another launcher has the host's name, and processes that are alive: two machines of one name.

        A launcher that reconnects has processes in common with its former stream; one that was started anew, none
        that lives.
        """
        known = self._fleet.supervisors.get(supervisor.host)
        if known is None or known.incarnations & supervisor.incarnations:
            return False
        return any(self._fleet.alive(incarnation) for incarnation in known.incarnations)

    def _hear_supervisor(
        self, message: pb.SuperviseRequest, send: Callable[[str, Any], None], mine: list[Supervisor]
    ) -> None:
        match message.WhichOneof("event"):
            case "processes":
                table = message.processes
                supervisor = Supervisor(
                    host=message.host,
                    send=send,
                    scalable=frozenset(filter(None, map(kind_name, table.scalable_kinds))),
                    incarnations=frozenset(process.incarnation for process in table.processes),
                )
                for process in table.processes:
                    check_name("processes.incarnation", process.incarnation)
                if not mine and self._has_rival(supervisor):
                    raise ServiceError(
                        grpc.StatusCode.ALREADY_EXISTS,
                        "HOST_TAKEN",
                        f"another launcher runs processes of this fleet as host {message.host!r}; give this host "
                        "another name (headrace join --name), or end the other launcher",
                    )
                mine.append(supervisor)
                self._fleet.supervised(supervisor)
            case "exit":
                words = message.exit.last_words.strip().splitlines()[-1:] or ["no last words"]
                reason = f"exited with {message.exit.exit_status}: {words[0][:MAX_REASON]}"
                if (
                    message.exit.incarnation in self._fleet.names
                ):  # A reconnecting supervisor repeats old exits.
                    log.warning("%s %s", message.exit.instance, reason)
                self._fleet.exited(message.exit.incarnation, reason)
            case "scale_result":
                result = message.scale_result
                self._on_scaled(result.request_id, result.error)
            case "hosts_gone":
                for host in message.hosts_gone.hosts:
                    check_name("hosts_gone.hosts", host)
                self._fleet.hosts_gone(message.hosts_gone.hosts[:MAX_NAMES])


def _check_speaks_for(known: Identity | None, kind: str, host: str) -> None:
    """Raises PERMISSION_DENIED where a certificate is not that of an instance of a kind at a host."""
    if known is not None and not (known.role == kind and known.is_at(host)):
        raise denied(f"the caller's certificate is that of {known.uri}; this is a {kind} at host {host!r}")


def _check_registration(request: pb.RegisterRequest) -> None:
    """Refuses a registration whose fields others could not use, before anything is written down."""
    for field in ("instance", "incarnation", "host"):
        check_name(field, getattr(request, field), optional=field == "host")
    check_enum("kind", pb.ServiceKind, request.kind)
    if not kind_name(request.kind):
        raise invalid("kind", "is missing")
    if request.address:
        split_address(check_name("address", request.address))
    names = [*request.devices, *request.capabilities, *request.open_runs]
    offered = [value for facet in request.capabilities.values() for value in facet.values]
    if len(names) + len(offered) > MAX_NAMES:
        raise invalid(
            "devices",
            f"{len(names) + len(offered)} names with those of capabilities and open_runs; at most {MAX_NAMES}",
        )
    for name in names:
        check_name("devices, capabilities and open_runs", name)
    for value in offered:
        if len(value) > MAX_CAPABILITY:  # A value may be a plug-in's JSON Schema of its options.
            raise invalid("capabilities", f"{len(value)} characters in a value; at most {MAX_CAPABILITY}")
    check_name("store_id", request.store_id, optional=True)
    check_name("boot_id", request.boot_id, optional=True)
    for lease in request.held_leases:
        check_at_least("held_leases.epoch", lease.epoch, 1)
    check_at_least("max_open_runs", request.max_open_runs, 0)
    _check_reports("open_run_reports", request.open_run_reports)


def _check_reports(field: str, reports: Sequence[common_pb2.OpenRunReport]) -> None:
    if len(reports) > MAX_NAMES:
        raise invalid(field, f"{len(reports)} reports; at most {MAX_NAMES}")
    for report in reports:
        check_name(f"{field}.run", report.run)
        check_number(f"{field}.open_id", report.open_id, most=HIGHEST_COMMAND)
        check_number(f"{field}.last_command", report.last_command, most=HIGHEST_COMMAND)
        check_enum(f"{field}.phase", common_pb2.OpenPhase, report.phase)


def _session_command(command: str, body: Any) -> pb.SessionResponse:
    if command == "grant":
        return pb.SessionResponse(grant=_grant(body))
    if command == "revoke":
        epoch, notice, keep = body
        revoke = pb.Revoke(epoch=epoch, keep_memory=keep)
        revoke.notice.FromMilliseconds(int(notice * 1000))
        return pb.SessionResponse(revoke=revoke)
    drain = pb.Drain()
    drain.grace.FromMilliseconds(int(body * 1000))
    return pb.SessionResponse(drain=drain)


def _grant(event: LeaseGranted) -> pb.Grant:
    grant = pb.Grant()
    grant.lease.epoch, grant.lease.run, grant.lease.stage = event.epoch, f"runs/{event.run}", event.stage
    grant.lease.devices.extend(event.devices)
    grant.lease.memory_part = event.memory_part
    return grant


def _supervisor_command(command: str, body: Any) -> pb.SuperviseResponse:
    if command == "kill":
        instance, incarnation, reason = body
        return pb.SuperviseResponse(kill=pb.Kill(instance=instance, incarnation=incarnation, reason=reason))
    request_id, kind, count = body
    return pb.SuperviseResponse(scale=pb.Scale(request_id=request_id, kind=KINDS[kind], count=count))


def _usage(beat: pb.Heartbeat) -> InstanceUsage:
    gpus = [(gpu.device, gpu.busy, gpu.used_memory_bytes) for gpu in beat.gpus[:MAX_NAMES]]
    far = Progress(
        max(0, beat.progress.done),
        max(0, beat.progress.total),
        beat.progress.unit[:MAX_WORD],
        beat.progress.note[:MAX_WORD],
    )
    progress = far if beat.HasField("progress") else None
    return InstanceUsage(beat.resident_memory_bytes, beat.busy_cores, tuple(gpus), progress)


@contextlib.asynccontextmanager
async def _pump(
    requests: AsyncIterator[Any], hear: Callable[[Any], None], outbox: asyncio.Queue[Any]
) -> AsyncIterator[None]:
    """Reads `requests` in the background; their end, or the refusal of one, goes into the outbox."""

    async def read() -> None:
        try:
            async for message in requests:
                hear(message)
        except ServiceError as refusal:
            outbox.put_nowait(refusal)
        finally:
            outbox.put_nowait(None)

    task = asyncio.ensure_future(read())
    try:
        yield
        if task.done():
            await task  # An error of the reading is the error of the call.
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
