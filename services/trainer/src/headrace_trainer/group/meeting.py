"""How the ranks of a new trainer group meet: a store that rank 0 serves, what each rank is, and who does not fit.

Every wait has a deadline and can be stopped from another thread, so that a rank which dies meanwhile holds nobody.
"""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import msgspec
import torch
import torch.distributed as dist
from headrace_modelkit.devices import model_name
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace_trainer.errors import Refusal, invalid

LOOK_S = 0.05
_VERSIONS = ("torch", "headrace-trainer")
CONNECT_LIMIT = timedelta(seconds=2)
"""Of one try to connect to it: torch's own tries do not see that the wait was stopped."""
_CALL_LIMIT = timedelta(seconds=15)
"""Of one exchange with rank 0's store."""


class Member(msgspec.Struct, frozen=True):
    """One rank: its instance, and `facts` that must be the same on all of them, by what they are called for people."""

    name: str = ""
    incarnation: str = ""
    facts: dict[str, str] = {}


class _Hello(msgspec.Struct, frozen=True):
    """What a rank tells at a meeting. Rank 0 adds where its liveness listens."""

    member: Member
    liveness_port: int = 0
    secret: bytes = b""


class MeetingStopped(Exception):
    """Nobody waits for this meeting any more."""


class Meeting:
    """The ranks of one generation under `store`; `members` by rank, once all are there."""

    def __init__(self, store: Store, members: list[Member], liveness_port: int, secret: bytes) -> None:
        self.store = store
        self.members = members
        self.liveness_port = liveness_port
        self.secret = secret


def own_facts(device: torch.device, dtype: str = "") -> dict[str, str]:
    """What has to be the same on all ranks: kind of device and model of GPU, versions, the weights' type where it is
    known.

    GPUs of two models would work in step at the slower one's pace, in the smaller one's memory, and round otherwise.
    """
    facts = {"devices of kind": device.type, "processors of kind": platform.machine()}
    if device.type == "cuda":
        facts["GPUs of model"] = model_name(device)
    for package in _VERSIONS:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts["torch"] = str(torch.__version__)
    return facts | ({"model.dtype": dtype} if dtype else {})


def meet(
    generation: int,
    rank: int,
    world_size: int,
    address: tuple[str, int],
    deadline: float,
    member: Member,
    liveness: tuple[int, bytes],
    stopped: threading.Event,
) -> Meeting:
    """Waits for all ranks; `deadline` is a time of `time.monotonic`, `liveness` rank 0's port and secret.

    Raises RuntimeError when not all come in time, MeetingStopped, and Refusal INVALID for ranks that do not fit.
    """
    host, port = address
    server = _store(host, port, rank, world_size, deadline, stopped)
    # A late rank of an older generation must not meet this one's keys.
    store = PrefixStore(f"generation-{generation}", server)
    hello = _Hello(member, *(liveness if rank == 0 else (0, b"")))
    store.set(f"rank-{rank}", msgspec.json.encode(hello).decode())
    keys = [f"rank-{other}" for other in range(world_size)]
    found: set[str] = set()

    def all_here() -> bool:
        found.update(key for key in keys if key not in found and store.check([key]))
        return len(found) == world_size

    def missing() -> str:
        return f"rank {', '.join(str(r) for r, key in enumerate(keys) if key not in found)} did not come"

    _await(all_here, deadline, stopped, missing)
    hellos = [msgspec.json.decode(store.get(key), type=_Hello) for key in keys]
    members = [each.member for each in hellos]
    check_alike(members)
    return Meeting(store, members, hellos[0].liveness_port, hellos[0].secret)


def check_alike(members: list[Member]) -> None:
    """Raises Refusal INVALID with the ranks, the fact and both values where two ranks do not fit together."""
    first = members[0]
    for rank, member in enumerate(members):
        for fact in sorted(first.facts.keys() & member.facts.keys()):
            mine, others = first.facts[fact], member.facts[fact]
            if mine != others:
                raise invalid(
                    f"rank {rank} ({member.name}) has {fact} {others} and rank 0 ({first.name}) has {fact} {mine}: "
                    "a trainer group needs the same on all ranks; start the trainers on hosts with the same devices "
                    "and the same installation"
                )


def _await(
    ready: Callable[[], bool], deadline: float, stopped: threading.Event, missing: Callable[[], str]
) -> None:
    while not ready():
        if stopped.wait(LOOK_S):
            raise MeetingStopped
        if time.monotonic() > deadline:
            raise RuntimeError(missing())


def _store(
    host: str, port: int, rank: int, world_size: int, deadline: float, stopped: threading.Event
) -> TCPStore:
    """Rank 0's store: served here, or connected to once it listens, by short tries."""
    found: list[TCPStore] = []

    def connect() -> bool:
        if rank and not _listens(host, port):
            return False
        try:
            found.append(TCPStore(host, port, world_size, rank == 0, CONNECT_LIMIT, wait_for_workers=False))
        except (RuntimeError, dist.DistNetworkError):
            if rank == 0:
                raise
        return bool(found)

    _await(connect, deadline, stopped, lambda: "rank 0 does not listen")
    found[0].set_timeout(_CALL_LIMIT)
    return found[0]


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


Failure = (RuntimeError, dist.DistNetworkError, OSError, ValueError)
"""What a meeting and the making of process groups raise where a rank is gone or late."""


def late(generation: int, world_size: int, where: str, timeout_s: float, error: Exception) -> Refusal:
    """The refusal of a meeting that failed."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Refusal(
        "RENDEZVOUS_TIMEOUT",
        f"trainer group generation {generation} of {world_size} ranks did not meet at {where} in "
        f"{timeout_s:g} s: {reason}",
        "unavailable",
    )
