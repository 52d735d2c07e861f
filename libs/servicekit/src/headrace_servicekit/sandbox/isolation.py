"""What this machine does not hold of users' code and of a model's code, as a service registers it.

It is tried in a process of its own: `python -m headrace_servicekit.sandbox.isolation`. Knows no scorer and no tool.
"""

from __future__ import annotations

import asyncio
import json
import sys

import grpc

from headrace_servicekit.config import settings_from_environment
from headrace_servicekit.contained.settings import (
    FACET,
    PREFIX,
    ContainedSettings,
    Containment,
    NotContained,
    is_contained,
)
from headrace_servicekit.process.confine import other_user
from headrace_servicekit.process.mounts import Mounts
from headrace_servicekit.process.worker import contain_workers
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.sandbox.run import NotHeld, require_walls

NOT_HELD = "not_held"
"""Facet of an instance's capabilities: sentences; empty where all is held."""
_PATIENCE_S = 60.0


def contain(capabilities: dict[str, list[str]]) -> None:
    """Contains the workers that are started from now on, where this host is told to, and registers by which walls.

    Raises ServiceError NOT_CONTAINED.
    """
    try:
        if is_contained():
            settings = settings_from_environment(ContainedSettings, PREFIX)
            containment = Containment(settings)
            contain_workers(containment)
            capabilities[FACET] = containment.walls
    except NotContained as error:
        status = grpc.StatusCode.FAILED_PRECONDITION
        raise ServiceError(status, "NOT_CONTAINED", str(error)) from error


async def not_held() -> list[str]:
    """Sentences of what is not held here."""
    command = (sys.executable, "-P", "-m", __name__)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            out, _ = await process.communicate()
        return [str(text) for text in json.loads(out)]
    except (TimeoutError, ValueError):
        return ["what holds users' code here could not be found out; see the log"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _found() -> list[str]:
    found = []
    try:
        require_walls("required")
    except NotHeld:
        found.append("a model's code is refused unless its spec says sandbox: best_effort")
    if not (user := other_user()):
        found.append("users' code has its service's user id")
    if sys.platform != "linux" or Mounts.enter(other_user=bool(user)) is None:
        files = "what is open to all" if user else "the files of its service's user"
        found.append(f"users' code reads {files}: no mounts of its own")
    return found


if __name__ == "__main__":
    print(json.dumps(_found()))
