"""The instances that a recording is replayed into: processes of one service, and the coordinator that they need.

That coordinator grants each the lease that its calls name, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace_servicekit.process.spawn import start_child
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.server import GrpcServer

from headrace_cli.errors import CommandError

LEASE = 1
"""Epoch of the lease that every instance gets."""
DAY_S = 86_400
"""Of a lease: a debugger may stop the instance."""
BEAT_S = 5
START_S = 120.0
STOP_S = 20.0
TAIL = 12
SERVICE = "headrace.coordinator.v1.FleetService"


@dataclass
class Member:
    """One instance of the stage: its process, and its channel once it has registered."""

    name: str
    process: asyncio.subprocess.Process
    log: Path | None
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    leased: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""
    channel: Any = None
    devices: Sequence[str] = ()

    def ended(self) -> CommandError:
        """What to say of a process that has ended."""
        words = ""
        if self.log is not None and self.log.exists():
            words = "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])
        text = f"{self.name} ended with status {self.process.returncode}"
        return CommandError(f"{text}; its log ends with:\n{words}" if words else text)


class Stage(fleet_pb2_grpc.FleetServiceServicer):  # type: ignore[misc]
    """Starts instances of `kind` below `directory`; use it as a context.

    `device_counts`: of each, how many devices it had; fewer where this host has fewer. `debug`: they have this
    terminal, so that breakpoint() works in them.
    """

    def __init__(
        self, kind: str, directory: Path, device_counts: Sequence[int], epoch: int, *, debug: bool
    ) -> None:
        self._kind, self._directory, self._counts = kind, directory, device_counts
        self._epoch, self._debug = epoch, debug
        self._server = GrpcServer("127.0.0.1:0", token=None, instance="replay")
        self.members: list[Member] = []

    async def __aenter__(self) -> Stage:
        self._server.add_service(fleet_pb2_grpc.add_FleetServiceServicer_to_server, self, SERVICE)
        address = await self._server.start()
        try:
            for index in range(len(self._counts)):
                self.members.append(await self._start(index, address))
            async with asyncio.timeout(START_S):
                for member in self.members:
                    await self.unless_ended(member, member.registered.wait())
                    await self.unless_ended(member, member.leased.wait())
                    if member.refusal:
                        raise CommandError(f"{member.name} refused its devices: {member.refusal}")
        except TimeoutError as error:
            await self.__aexit__()
            raise CommandError(f"the {self._kind} did not start within {START_S:.0f} s") from error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            if member.channel is not None:
                await member.channel.close()
            if member.process.returncode is None:
                member.process.terminate()
        for member in self.members:
            try:
                async with asyncio.timeout(STOP_S):
                    await member.process.wait()
            except TimeoutError:
                member.process.kill()
                await member.process.wait()
        await self._server.drain(0)

    async def unless_ended(self, member: Member, work: Any) -> Any:
        """The result of `work`. Raises CommandError where the instance's process ends first."""
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(member.process.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise member.ended()
            return task.result()
        finally:
            ended.cancel()
            task.cancel()

    async def _start(self, index: int, coordinator: str) -> Member:
        name = f"{self._kind}-{index}"
        command = [
            *(sys.executable, "-m", f"headrace_{self._kind}", "--name", name, "--incarnation", name),
            *("--coordinator", coordinator, "--listen", "127.0.0.1:0"),
            *("--shm-dir", str(self._directory / "shm"), "--data-dir", str(self._directory / "data")),
        ]
        if self._kind != "reward":
            command += ["--devices", "auto"]
        # A fleet's own settings, such as its token, are not meant for this instance.
        variables = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        if self._debug:
            return Member(name, await asyncio.create_subprocess_exec(*command, env=variables), None)
        log = self._directory / f"{name}.log"
        with log.open("wb") as output:
            process = await start_child(command, environment=variables, output=output.fileno())
        return Member(name, process, log)

    def _member(self, incarnation: str) -> Member:
        return next(member for member in self.members if member.name == incarnation)

    # --- what a coordinator answers

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        """Takes an instance in."""
        member = self._member(request.incarnation)
        index = self.members.index(member)
        count = max(1, self._counts[index])
        own = list(request.devices)
        member.devices = (
            own[:count] if len(self._counts) == 1 else own[index % len(own) :][:count] if own else []
        )
        if member.channel is None:
            member.channel = dial(request.address, token=None)
        member.registered.set()
        return fleet_pb2.RegisterResponse(
            coordinator_epoch=self._epoch,
            heartbeat_interval=duration_pb2.Duration(seconds=BEAT_S),
            lease_ttl=duration_pb2.Duration(seconds=DAY_S),
        )

    async def Session(
        self, requests: AsyncIterator[fleet_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[fleet_pb2.SessionResponse]:
        """Grants the lease, and renews it with each heartbeat."""
        granted = False
        async for request in requests:
            member, event = self._member(request.incarnation), request.WhichOneof("event")
            if event == "lease_held":
                member.refusal = request.lease_held.refusal
                member.leased.set()
            elif event == "heartbeat":
                beat = request.heartbeat
                ack = fleet_pb2.HeartbeatAck(sequence=beat.sequence, renewed_epochs=beat.lease_epochs)
                yield fleet_pb2.SessionResponse(heartbeat_ack=ack)
            if not granted:
                granted = True
                if not member.devices:
                    member.leased.set()  # A service that works without devices.
                    continue
                lease = common_pb2.Lease(
                    epoch=LEASE,
                    stage="replay",
                    devices=member.devices,
                    ttl=duration_pb2.Duration(seconds=DAY_S),
                )
                yield fleet_pb2.SessionResponse(grant=fleet_pb2.Grant(lease=lease))
