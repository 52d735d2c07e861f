"""Processes beside the children, which hold what users' code must not reach: an engine of containers. Knows no gRPC.

A backend's plug-in names the module of its broker. One process of it serves all children of that backend, over a socket
in a folder that they alone see. It runs with this service's own rights and environment.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headrace_servicekit.process.confine import other_user
from headrace_servicekit.process.worker import Worker, WorkerGone, WorkerTimeout, exit_description
from headrace_servicekit.process.worker_pipes import JSON_CODEC, JsonMessage

BROKER_VARIABLE = "HEADRACE_BROKER"
"""Where a child finds the folder of its broker's socket."""
_AGAIN_S = 1.0
_END_S = 20.0
"""How long one may take to remove what it holds."""


class BrokerLost(Exception):
    """The broker of a backend does not start; the message says why."""


class Brokers:
    """The brokers of this service by their modules; each is started as it is first asked for, and when it has ended."""

    def __init__(self, modules: Mapping[str, str], start_timeout_s: float) -> None:
        self._modules, self._start_timeout_s = modules, start_timeout_s
        self._starting: dict[str, asyncio.Task[Path]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def folder(self, backend: str) -> Path | None:
        """The folder of a backend's broker, which runs; None for a backend that has none.

        Raises BrokerLost.
        """
        module = self._modules.get(backend)
        if module is None:
            return None
        if module not in self._starting:
            self._starting[module] = asyncio.create_task(self._start(module))
        try:
            return await asyncio.shield(self._starting[module])
        except BrokerLost:
            self._starting.pop(module, None)
            raise

    async def close(self) -> None:
        """Ends all of them."""
        tasks = [*self._starting.values(), *self._watching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, module: str) -> Path:
        # Paths of sockets are short, and those of users' folders are not.
        folder = Path(tempfile.mkdtemp(prefix="headrace-broker-"))
        os.chmod(folder, 0o755)  # nosec B103 - users' code passes
        try:
            worker = await self._run(module, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._watching[module] = asyncio.create_task(self._watch(module, folder, worker))
        return folder

    async def _run(self, module: str, folder: Path) -> Worker[JsonMessage]:
        worker = await Worker.start(module, JSON_CODEC)
        try:
            worker.send({"folder": str(folder), "users": [os.getuid(), other_user() or os.getuid()]})
            answer = await worker.receive(self._start_timeout_s)
        except (WorkerGone, WorkerTimeout) as error:
            status = await worker.kill()
            raise BrokerLost(f"{module} does not start: {error}; it {exit_description(status)}") from error
        except BaseException:
            await worker.kill()
            raise
        if why := answer.get("error"):
            await worker.kill()
            raise BrokerLost(str(why))
        return worker

    async def _watch(self, module: str, folder: Path, worker: Worker[JsonMessage]) -> None:
        """Starts it again, in the same folder, whenever it has ended."""
        try:
            while True:
                status = await worker.process.wait()
                sys.stderr.write(f"{module} {exit_description(status)} and is started again\n")
                await worker.kill()
                while True:
                    try:
                        worker = await self._run(module, folder)
                        break
                    except BrokerLost as lost:
                        sys.stderr.write(f"{lost}\n")
                        await asyncio.sleep(_AGAIN_S)
        finally:
            worker.writer.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await worker.process.wait()
            with suppress(TimeoutError):
                await worker.kill()
            shutil.rmtree(folder, ignore_errors=True)
