"""What an engine of containers can do for a scaler, and the scaler, which is a supervisor without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from headrace_servicekit.logs import get_logger
from headrace_servicekit.process.child import ProcessInfo

_logger = get_logger(__name__)


class Orchestrator(Protocol):
    """Runs containers of services, by kind. Its calls block."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of which it can change the number."""

    def scale(self, kind: str, containers: int) -> str:
        """Wants so many containers of a kind; returns why that cannot be, or "". Waits for no process."""


class Scaler:
    """Passes the coordinator's numbers of instances on, as numbers of containers."""

    def __init__(self, orchestrator: Orchestrator, instances: Mapping[str, int]) -> None:
        """`instances`: how many a container of a kind has; 1 where it is not named."""
        self._orchestrator = orchestrator
        self._instances = instances

    @property
    def scalable_kinds(self) -> tuple[str, ...]:
        """Kinds whose number the coordinator may change."""
        return self._orchestrator.kinds

    async def scale(self, kind: str, n: int) -> str:
        """Wants `n` instances of a kind; returns why that cannot be, or ""."""
        each = self._instances.get(kind, 1)
        if n % each:
            return f"scale {kind}={n}: a container of it has {each} instances; ask for a multiple of {each}"
        refusal = await asyncio.to_thread(self._orchestrator.scale, kind, n // each)
        _logger.info("scaled", extra={"kind": kind, "containers": n // each, "refusal": refusal})
        return refusal

    def processes(self) -> list[ProcessInfo]:
        """None: each container has a supervisor of its own."""
        return []

    def kill(self, instance: str, incarnation: str, reason: str = "") -> bool:
        """Kills nothing: the container's own supervisor does."""
        return False


def numbers_of(text: str) -> dict[str, int]:
    """Numbers by kind from "rollout=1,trainer=4". Raises ValueError."""
    found = {}
    for item in filter(None, text.split(",")):
        kind, equals, number = item.partition("=")
        if not equals or not number.isdecimal() or not int(number):
            raise ValueError(f"{item!r}; write KIND=NUMBER, separated by commas")
        found[kind] = int(number)
    return found
