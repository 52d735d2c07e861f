"""A service's end of the process that speaks with a store. Starts it when it is needed, and anew after a problem."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TypeVar

from headrace_schema.progress import Progress
from headrace_schema.stores import remote_paths, with_paths
from pydantic import BaseModel

from headrace_servicekit.process.spawn import signal_group
from headrace_servicekit.stores.problems import StoreProblem

PROGRESS = b"progress "
"""Begins a line that says how far a command is, in place of its answer."""
_LINE_BYTES = 2**26
_Section = TypeVar("_Section", bound=BaseModel)


class StoreProcess:
    """Commands to one store, one at a time. A new process reads credentials anew."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._progress: Progress | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def read(self) -> Progress | None:
        """How far the command in hand is, where it says so."""
        return self._progress

    async def ask(self, command: str, **asked: Any) -> Any:
        """The answer to a command of `__main__`. Raises StoreProblem."""
        async with self._turn:
            try:
                answer = await self._answered({"do": command, "url": self.url, **asked})
            except BaseException:
                await self.stop()  # A command that nobody waits for must not go on.
                raise
            if (told := answer.get("problem")) is not None:
                await self.stop()
                raise StoreProblem(told["reason"], told["fix"], lasting=told["lasting"], code=told["code"])
            return answer["answer"]

    async def _answered(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace_servicekit.stores", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        line = b""
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
            while (line := await process.stdout.readline()).startswith(PROGRESS):
                self._progress = Progress(*json.loads(line.removeprefix(PROGRESS)))
        self._progress = None
        if not line.endswith(b"\n"):
            await self.stop()
            reason = f"the process that speaks with {self.url} has ended (status {process.returncode})"
            raise StoreProblem(reason, "the log of the service says why", lasting=False)
        found: dict[str, Any] = json.loads(line)
        return found

    async def stop(self) -> None:
        """Ends the process, whatever it does; the next command starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
        with suppress(asyncio.CancelledError):
            await asyncio.shield(process.wait())


async def asked_once(url: str, command: str, seconds: float) -> Any:
    """The answer of a process of its own to one command. Raises StoreProblem, also where it takes longer."""
    process = StoreProcess(url)
    try:
        async with asyncio.timeout(seconds):
            return await process.ask(command)
    except TimeoutError:
        fix = "check the address of the store, such as AWS_ENDPOINT_URL, and the network"
        raise StoreProblem(
            f"{url}: the store has not answered in {seconds:g} s", fix, lasting=False
        ) from None
    finally:
        await process.stop()


async def localized_aside(section: _Section, key: str, seconds: float) -> _Section:
    """As `files.localized`, in a process of its own. Raises StoreProblem, whose `key` is that of the address."""
    given = section.model_dump(mode="json")
    places: dict[str, str] = {}
    for below, url in remote_paths(given):
        try:
            places[url] = await asked_once(url, "local", seconds)
        except StoreProblem as problem:
            problem.key = f"{key}.{below}"
            raise
    return type(section).model_validate(with_paths(given, places.__getitem__)) if places else section
