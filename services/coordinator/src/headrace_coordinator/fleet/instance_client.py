"""How the coordinator reaches an instance: one call, one stream. gRPC and the simulation implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

Response = TypeVar("Response")

USER_ERRORS = frozenset({"INVALID", "MODEL_NOT_READABLE", "UNIMPLEMENTED", "INVALID_ARGUMENT"})
"""Reasons of refusals that asking again does not change: what is wrong is in the spec."""


SCORER_AWAY = "SCORER_AWAY"
"""Reason of a reward instance that cannot open a run: what a scorer stands on, such as a judge, is not there now."""


class InstanceDown(Exception):
    """No answer from an instance: dead, cut off or out of time. What it did is unknown."""

    def __init__(self, incarnation: str, message: str) -> None:
        super().__init__(f"{incarnation}: {message}")
        self.incarnation = incarnation


class CallRefused(Exception):
    """An instance answered with an error; `key` is the key of the spec that has to change, where it named one."""

    def __init__(self, incarnation: str, reason: str, message: str, key: str = "") -> None:
        super().__init__(f"{incarnation} refused ({reason}): {message}")
        self.incarnation = incarnation
        self.reason = reason
        self.message = message
        self.key = key


class InstanceClient(Protocol):
    """One instance, by RPC name. Messages are the contracts' own; methods raise `InstanceDown` and `CallRefused`."""

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """A unary call; returns the method's response message."""

    def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        """The responses to one request, or to an iterator of them; closing the responses cancels the call."""


Connect = Callable[[str, str, str], InstanceClient]
"""(kind, address, incarnation) → the client of an instance."""
