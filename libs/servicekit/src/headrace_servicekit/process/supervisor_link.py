"""A supervisor's stream to the coordinator: reports processes and their ends, obeys Scale and Kill."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc

from headrace_servicekit.instance_config import KINDS, kind_name
from headrace_servicekit.logs import get_logger
from headrace_servicekit.process.child import ProcessEnd, ProcessInfo
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_servicekit.rpc.tls import COORDINATOR_NAME

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 3.0
_REMEMBERED_EXITS = 256
_SETTLED_S = 0.5
_logger = get_logger(__name__)
_Call = grpc.aio.StreamStreamCall[fleet_pb2.SuperviseRequest, fleet_pb2.SuperviseResponse]


class Supervised(Protocol):
    """Who has processes, or has others start them."""

    @property
    def scalable_kinds(self) -> tuple[str, ...]:
        """Kinds whose number the coordinator may change."""

    async def scale(self, kind: str, n: int) -> str:
        """Wants `n` processes of a kind; returns why that cannot be, or ""."""

    def processes(self) -> list[ProcessInfo]:
        """What runs or waits to be started."""

    def kill(self, instance: str, incarnation: str, reason: str = "") -> bool:
        """SIGKILLs a process; False when that incarnation is not running."""


class SupervisorLink:
    """Keeps a Supervise stream open. Ends are reported again on every new stream: they prove that devices are free."""

    def __init__(self, host: str, address: str, token: str | None, supervisor: Supervised) -> None:
        self._host = host
        self._address = address
        self._token = token
        self._supervisor = supervisor
        self._exits: deque[fleet_pb2.ProcessExit] = deque(maxlen=_REMEMBERED_EXITS)
        self._outbox: deque[fleet_pb2.SuperviseRequest] = deque(maxlen=2 * _REMEMBERED_EXITS)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.away = "not connected yet"
        """Why there is no stream; "" while there is one."""
        self.refusal = ""
        """The coordinator's reason for refusing this supervisor, such as HOST_TAKEN; "" where it does not."""

    def start(self) -> None:
        """Connects in the background."""
        if self._address:
            self._task = asyncio.create_task(self._run(), name="supervisor link")

    async def stop(self) -> None:
        """Ends the stream, after a moment in which the last messages are sent."""
        if self._task is None:
            return
        for _ in range(20):
            if not self._outbox:
                break
            await asyncio.sleep(0.05)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def report_processes(self) -> None:
        """Reports the set of processes as it is now."""
        processes = [
            fleet_pb2.SupervisedProcess(
                instance=info.instance, incarnation=info.incarnation, kind=KINDS[info.kind], pid=info.pid
            )
            for info in self._supervisor.processes()
            if info.pid and info.kind in KINDS
        ]
        scalable = [KINDS[kind] for kind in self._supervisor.scalable_kinds]
        table = fleet_pb2.ProcessTable(processes=processes, scalable_kinds=scalable)
        self._send(fleet_pb2.SuperviseRequest(processes=table))

    def report_exit(self, end: ProcessEnd) -> None:
        """Reports the end of a process."""
        if end.kind in KINDS:
            told = fleet_pb2.ProcessExit(
                instance=end.instance,
                incarnation=end.incarnation,
                exit_status=end.status,
                last_words=end.last_words,
            )
            self._exits.append(told)
            self._send(fleet_pb2.SuperviseRequest(exit=told))

    def report_gone(self, hosts: Sequence[str]) -> None:
        """Reports hosts whose containers are gone, again at each call: the coordinator may have been away."""
        if hosts and not self.away:
            self._send(fleet_pb2.SuperviseRequest(hosts_gone=fleet_pb2.HostsGone(hosts=hosts)))

    def _send(self, message: fleet_pb2.SuperviseRequest) -> None:
        if self._address:
            message.host = self._host
            self._outbox.append(message)
            self._wake.set()

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                async with dial(self._address, token=self._token, name=COORDINATOR_NAME) as channel:
                    await channel.channel_ready()
                    backoff = _FIRST_BACKOFF_S
                    await self._exchange(fleet_pb2_grpc.FleetServiceStub(channel).Supervise())  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError as error:
                self.away = message_of(error) or error.code().name
                self.refusal = reason_of(error) or ""
                _logger.warning("supervisor line lost", extra={"why": self.away})
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _exchange(self, call: _Call) -> None:
        self._outbox.clear()
        self.report_processes()
        for told in self._exits:
            self._send(fleet_pb2.SuperviseRequest(exit=told))
        settled = asyncio.get_running_loop().call_later(_SETTLED_S, self._settled)
        both = {asyncio.ensure_future(self._write(call)), asyncio.ensure_future(self._read(call))}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            settled.cancel()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            call.cancel()

    def _settled(self) -> None:
        """A coordinator that refuses this supervisor has ended the stream by now."""
        self.away = self.refusal = ""

    async def _write(self, call: _Call) -> None:
        while True:
            self._wake.clear()
            while self._outbox:
                await call.write(self._outbox[0])
                self._outbox.popleft()
            await self._wake.wait()

    async def _read(self, call: _Call) -> None:
        async for response in call:
            match response.WhichOneof("command"):
                case "scale":
                    await self._scale(response.scale)
                case "kill":
                    kill = response.kill
                    self._supervisor.kill(kill.instance, kill.incarnation, kill.reason)
                case None:
                    pass

    async def _scale(self, scale: fleet_pb2.Scale) -> None:
        kind, error = kind_name(scale.kind), ""
        if kind not in self._supervisor.scalable_kinds:
            allowed = ", ".join(self._supervisor.scalable_kinds) or "none"
            error = f"{kind or 'this kind'} cannot be scaled here; scalable kinds: {allowed}"
        elif scale.count < 0:
            error = f"the number of processes cannot be {scale.count}"
        else:
            error = await self._supervisor.scale(kind, scale.count)
        result = fleet_pb2.ScaleResult(
            request_id=scale.request_id, kind=scale.kind, count=scale.count, error=error
        )
        self._send(fleet_pb2.SuperviseRequest(scale_result=result))
