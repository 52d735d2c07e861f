"""One child process from the parent's side: asks it within limits, and replaces it when it dies or hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace_servicekit.lease.devices import bind_cpu, gpu_uuids
from headrace_servicekit.process.worker import UsersCode, Worker, WorkerGone, WorkerTimeout, exit_description

from headrace_simulator.pipes import CODEC, MEMORY_PART, Kind, Message
from headrace_simulator.pools.brokers import BROKER_VARIABLE, BrokerLost, Brokers

MODULE = "headrace_simulator.child"
ROBOT, ROBOT_VARIABLE = "robot", "HEADRACE_SIMULATOR_ROBOT"
"""The backend of real robots, and where its processes find the robot file of this host."""
MAX_LISTED = 60_000
"""Characters of one backend's list of environments in a registration."""


class HostLost(Exception):
    """The child died, hung or could not be made; its environments are new. The message says which."""


class HostFault(Exception):
    """The child answered that it cannot: `field` is the request's key that has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


class ChildHost:
    """A child with some environments of a pool. `generation` counts the processes it has been.

    Who asks it something holds `turn` until the last answer, and is not cancelled in between.
    """

    def __init__(
        self, opening: dict[str, Any], open_timeout_s: float, brokers: Brokers | None = None
    ) -> None:
        self.generation = 0
        self.description = b""
        """The OpenPoolResponse that describes the environments, serialized."""
        self.turn = asyncio.Lock()
        self.devices: tuple[str, ...] = ()
        """Of the lease under which it is asked; its processes compute there from the next question on."""
        self.share = 1
        """How many children divide these devices' cores, and their part of the memory."""
        self.memory_part = 1.0
        self._bound: tuple[str, ...] = ()
        self._opening = json.dumps(opening).encode()
        shelf = [Path(opening["shelf"][0])] if opening.get("shelf") else []
        self._backend, self._brokers = opening["backend"], brokers
        self._code = UsersCode(
            opening["options"] | {"": opening["name"]}, variables=opening.get("env", ()), writes=shelf
        )
        self._open_timeout_s = open_timeout_s
        self._starting: asyncio.Task[Worker[Message]] | None = None

    async def open(self) -> None:
        """Starts the child; HostFault or HostLost where it cannot make its environments."""
        async with self.turn:
            await self.ready()

    async def ready(self) -> Worker[Message]:
        """The child, once its environments are made; HostFault or HostLost where they cannot be."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            # The start goes on when the caller is cancelled; one that has ended is not waited for, in each step.
            starting = self._starting
            child = starting.result() if starting.done() else await asyncio.shield(starting)
        except (HostFault, HostLost):
            self._starting = None
            raise
        return child if self._bound == self.devices else await self._bind(child)

    async def answer(self, child: Worker[Message], timeout_s: float) -> bytes:
        """The child's next answer.

        Raises:
            HostLost: the child died or took longer than `timeout_s`; the next one is being made.
            HostFault: it says that it cannot.
        """
        try:
            return _payload(await child.receive(timeout_s))
        except WorkerTimeout as error:
            await self._replace(child)
            raise HostLost(f"it took longer than {timeout_s:g} s and was killed") from error
        except WorkerGone as error:
            status = await child.wait_or_kill()
            await self._replace(child)
            raise HostLost(f"its process {exit_description(status)}") from error

    async def end_process(self) -> None:
        """Ends the child, which frees its GPU memory; the next request makes another one."""
        async with self.turn:
            await self.close()
            self.generation += 1

    async def kill(self) -> None:
        """Kills a child that is at work: waiting for its answer raises HostLost."""
        starting = self._starting
        if starting is not None and starting.done() and starting.exception() is None:
            await starting.result().kill()

    async def close(self) -> None:
        """Kills the child. A closed host is asked nothing more."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().kill()

    async def _replace(self, child: Worker[Message]) -> None:
        await child.kill()
        self.generation += 1
        # At once, so that a new environment stands ready when its reset comes.
        self._starting = asyncio.create_task(self._start())

    async def _bind(self, child: Worker[Message]) -> Worker[Message]:
        """The child on the devices of the present lease: the same process on CPU slots, another one on other GPUs."""
        if gpu_uuids(self.devices) != gpu_uuids(self._bound):
            await self._replace(child)
            assert self._starting is not None
            return await asyncio.shield(self._starting)
        self._place(child)
        await self.answer(child, self._open_timeout_s)
        return child

    def _place(self, child: Worker[Message]) -> None:
        """Binds a child to its devices, and tells it, which it answers, how many threads it has there."""
        self._bound = self.devices
        cores = bind_cpu(self.devices, child.process.pid)
        child.send((Kind.THREADS, json.dumps({"threads": max(1, cores // self.share)}).encode()))

    async def _start(self) -> Worker[Message]:
        gpus = gpu_uuids(self.devices)
        part = {MEMORY_PART: str(self.memory_part / self.share)} if self.memory_part < 1 else {}
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **part} if gpus else None
        code, variables = self._code, variables or {}
        try:
            broker = await self._brokers.folder(self._backend) if self._brokers is not None else None
        except BrokerLost as lost:
            raise HostFault("environment.backend", f"{self._backend} cannot be had: {lost}") from lost
        if broker is not None:
            code, variables = replace(code, reads=[broker]), {**variables, BROKER_VARIABLE: str(broker)}
        child = await Worker.start(MODULE, CODEC, variables=variables, code=code)
        self._bound = self.devices
        try:
            if self.devices:
                self._place(child)
                await child.receive(self._open_timeout_s)
            child.send((Kind.OPEN, self._opening))
            self.description = _payload(await child.receive(self._open_timeout_s))
        except WorkerTimeout as error:
            await child.kill()
            raise HostLost(f"making it took longer than {self._open_timeout_s:g} s") from error
        except WorkerGone as error:
            status = await child.wait_or_kill()
            raise HostLost(f"its process {exit_description(status)} while it was made") from error
        except BaseException:  # cancelled or refused: nobody else ends a child without environments
            await child.kill()
            raise
        return child


def _payload(frame: tuple[Kind, bytes]) -> bytes:
    kind, payload = frame
    if kind is Kind.FAULT:
        raise HostFault(**json.loads(payload))
    return payload


async def list_environments(
    timeout_s: float, robot: str = ""
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Backend and name of every environment, and modules of brokers by backend; see `child.__main__.catalogue`.

    Of a `robot`'s host: of that alone.

    Raises:
        WorkerGone, WorkerTimeout: the child could not tell.
    """
    variables = {ROBOT_VARIABLE: robot} if robot else None
    child = await Worker.start(MODULE, CODEC, variables=variables, code=UsersCode())
    try:
        child.send((Kind.CATALOGUE, b""))
        _, payload = await child.receive(timeout_s)
        found = json.loads(payload)
        listed = [(backend, name) for backend, name in found["environments"]]
        return [each for each in listed if not robot or each[0] == ROBOT], found["brokers"]
    finally:
        await child.kill()


def endpoint_of(options_json: str) -> tuple[str, int] | None:
    """Host and port of the endpoint that a rollout gives an agent as it starts one; None of other resets."""
    try:
        given = json.loads(options_json or "{}")
        url = urlsplit(given["base_url"])
        return (url.hostname, url.port or 80) if url.hostname else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def task_capabilities(catalogue: Iterable[tuple[str, str]]) -> list[str]:
    """What an instance registers of its environments: "BACKEND=" and the JSON list of their names, for each backend.

    A backend that lists none, or too many for a registration, is left out: its tasks are checked as pools are opened.
    """
    names: dict[str, list[str]] = {}
    for backend, name in catalogue:
        if name:
            names.setdefault(backend, []).append(name)
    listed = [f"{backend}={json.dumps(sorted(found))}" for backend, found in sorted(names.items())]
    return [text for text in listed if len(text) <= MAX_LISTED]
