"""What the fleet keeps of a connected process: its session, what it has open, its supervisor; and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from headrace.common.v1 import common_pb2
from headrace_schema.progress import Progress


class ForeignInstance(Exception):
    """A process obeys another store's coordinator; the message is for its operator."""


class FleetSettings(msgspec.Struct, frozen=True):
    """Intervals of sessions and leases, in seconds."""

    lease_ttl: float = 30.0
    heartbeat: float = 5.0
    sweep: float = 1.0
    notice: float = 20.0


class OpenReport(msgspec.Struct, frozen=True):
    """A run that an instance says it has open: OPENING, OPEN or CLOSING, and the last command it applied."""

    run: str
    open_id: int
    phase: str
    last_command: int = 0


def open_reports(messages: Iterable[common_pb2.OpenRunReport]) -> list[OpenReport]:
    """An instance's reports, by run id."""
    return [
        OpenReport(
            message.run.removeprefix("runs/"),
            message.open_id,
            common_pb2.OpenPhase.Name(message.phase).removeprefix("OPEN_PHASE_"),
            message.last_command,
        )
        for message in messages
    ]


class InstanceUsage(msgspec.Struct, frozen=True):
    """What an instance uses, as its last heartbeat said."""

    resident_memory_bytes: int = 0
    busy_cores: float = 0.0
    gpus: tuple[tuple[str, float, int], ...] = ()
    """(device, busy share, bytes used) of each GPU that it holds."""
    progress: Progress | None = None
    """How far a long piece of work of its is."""


class Session(msgspec.Struct):
    """The open session of one instance."""

    send: Callable[[str, Any], None]
    heard_at: float
    opened_at: float = 0.0
    usage: InstanceUsage = InstanceUsage()
    drain_sent: bool = False


class Supervisor(msgspec.Struct):
    """A connected supervisor: what it runs, and how to command it."""

    host: str
    send: Callable[[str, Any], None]
    scalable: frozenset[str] = frozenset()
    incarnations: frozenset[str] = frozenset()
