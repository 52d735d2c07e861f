"""What the trainer refuses, as a reason, a sentence and a kind. Knows no wire; `service` maps the kinds."""

from __future__ import annotations

from typing import Literal

from headrace_servicekit.registry import PluginError
from headrace_servicekit.stores.problems import StoreProblem

Kind = Literal["precondition", "conflict", "invalid", "not_found", "exhausted", "unavailable"]


class Refusal(Exception):
    """A request that the trainer's state or its own content does not allow.

    `reason` is a stable upper-case word for programs; the message says what to change.
    """

    def __init__(self, reason: str, message: str, kind: Kind = "precondition", **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.kind: Kind = kind
        self.metadata = metadata


class Quiesced(Refusal):
    """A rank's lease was not renewed in time: no rank began the round. Trying again is safe."""

    def __init__(self, message: str) -> None:
        super().__init__("LEASE_QUIESCED", message)


class OutOfMemory(Refusal):
    """A device had no room for a round, of which nothing counts.

    `group_lost`: the trainer group is over, as the other ranks could not go on without the one that had no room.
    `retries`: what is tried next is less, so that the same step is not repeated as it was.
    """

    def __init__(self, message: str, *, group_lost: bool) -> None:
        super().__init__("OUT_OF_MEMORY", message, "unavailable")
        self.group_lost = group_lost
        self.retries = False


def invalid(message: str, reason: str = "INVALID", **metadata: str) -> Refusal:
    """A request whose content is wrong, whatever the state."""
    return Refusal(reason, message, "invalid", **metadata)


def away(problem: StoreProblem) -> Refusal:
    """The refusal of a path in a store that cannot be read, now or ever."""
    if problem.lasting:
        return invalid(str(problem), "MODEL_NOT_READABLE")
    return Refusal("STORE", str(problem), "unavailable")


def refused(error: PluginError) -> Refusal:
    """The refusal of a plug-in that is not installed, or of its options."""
    return Refusal("INVALID", str(error), "invalid", **error.metadata)


def conflict(message: str) -> Refusal:
    """A request that does not fit what is there: such as a key that an earlier one had with other content."""
    return Refusal("CONFLICT", message, "conflict")
