"""A trainer group is formed: its ranks meet at a store of rank 0, make process groups, and hear each other meanwhile.

Nobody waits longer than the deadline for a rank that has died or stands still, in whichever of these it was.
"""

from __future__ import annotations

import hmac
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import msgspec
import torch
import torch.distributed as dist
from headrace_modelkit.devices import model_name
from headrace_servicekit.rpc.addresses import listening, split_address
from headrace_servicekit.rpc.errors import ServiceError
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group import connections
from headrace_trainer.group.group import COLLECTIVE_LIMIT, IDLE_LIMIT, Member, OnLost, TrainerGroup
from headrace_trainer.group.liveness import SECRET_BYTES, SILENT_S, Liveness

LOOK_S = 0.05
_VERSIONS = ("torch", "headrace-trainer")
CONNECT_LIMIT = timedelta(seconds=2)
"""Of one try to connect to it: torch's own tries do not see that the wait was stopped."""
_CALL_LIMIT = timedelta(seconds=15)
"""Of one exchange with rank 0's store."""


class Place(msgspec.Struct, frozen=True):
    """Where a trainer group meets: rank 0 is reached at `host`, and listens at `listen`.

    torch's store tells whoever connects to it all that it holds. By `secret`, of the fleet's token and the meeting, the
    ranks know their keys and each other.
    """

    host: str
    port: int
    listen: str
    secret: bytes

    @property
    def prefix(self) -> str:
        """Before all keys of this meeting; a late rank of an older one has another."""
        return self.secret[SECRET_BYTES:].hex()

    @property
    def hello(self) -> bytes:
        """What the ranks' liveness shows to each other."""
        return self.secret[:SECRET_BYTES]


def secret_of(token: str | None, run: str, generation: int) -> bytes:
    """The secret of one meeting, which each holder of the fleet's token can tell."""
    return hmac.digest((token or "").encode(), f"{run}/{generation}".encode(), "sha256")


class _Hello(msgspec.Struct, frozen=True):
    """What a rank tells at a meeting. Rank 0 adds where its liveness listens."""

    member: Member
    liveness_port: int = 0


class MeetingStopped(Exception):
    """Nobody waits for this meeting any more."""


class Meeting:
    """The ranks of one generation under `store`; `members` by rank, once all are there."""

    def __init__(self, store: Store, members: list[Member], liveness_port: int) -> None:
        self.store = store
        self.members = members
        self.liveness_port = liveness_port


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
    place: Place,
    rank: int,
    world_size: int,
    deadline: float,
    member: Member,
    liveness_port: int,
    stopped: threading.Event,
) -> Meeting:
    """Waits for all ranks; `deadline` is a time of `time.monotonic`, `liveness_port` rank 0's.

    Raises RuntimeError when not all come in time, MeetingStopped, and Refusal INVALID for ranks that do not fit.
    """
    store = PrefixStore(place.prefix, _store(place, rank, world_size, deadline, stopped))
    hello = _Hello(member, liveness_port)
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
    store.set(f"read-{rank}", "")
    try:
        check_alike(members)
    except Refusal:
        if rank == 0:  # its store ends with it: the others have read before who does not fit
            read = [f"read-{other}" for other in range(world_size)]
            with suppress(RuntimeError, MeetingStopped):
                _await(lambda: store.check(read), min(deadline, time.monotonic() + 2.0), stopped, missing)
        raise
    return Meeting(store, members, hellos[0].liveness_port)


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


def _store(place: Place, rank: int, world_size: int, deadline: float, stopped: threading.Event) -> TCPStore:
    """Rank 0's store: served here, or connected to once it listens, by short tries."""
    found: list[TCPStore] = []

    def connect() -> bool:
        if rank and not _listens(place.host, place.port):
            return False
        try:
            found.append(_tcp_store(place, rank, world_size))
        except (RuntimeError, dist.DistNetworkError):
            if rank == 0:
                raise
        return bool(found)

    _await(connect, deadline, stopped, lambda: "rank 0 does not listen")
    found[0].set_timeout(_CALL_LIMIT)
    return found[0]


def _tcp_store(place: Place, rank: int, world_size: int) -> TCPStore:
    """torch's own server would listen at all addresses."""
    descriptor = None if rank else listening(place.listen, place.port).detach()
    return TCPStore(
        place.host,
        place.port,
        world_size,
        rank == 0,
        CONNECT_LIMIT,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


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


LEAST_FORMING_S = 10.0
"""For making process groups once all ranks have met, however late that was."""
GUARD_S = 0.25


def join_trainer_group(
    generation: int,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_s: float,
    device: torch.device,
    *,
    listen: str = "",
    secret: bytes = b"",
    member: Member | None = None,
    on_lost: OnLost = lambda _members: None,
    stopped: threading.Event | None = None,
    silent_s: float = SILENT_S,
) -> TrainerGroup:
    """Meets the other ranks; rank 0 serves the rendezvous store at host:port.

    A single rank needs no rendezvous. Rank 0 listens at the host `listen`, by default the rendezvous'; all ranks have
    the same `secret`. `member` is this rank; `on_lost` hears of ranks that end, or are not heard for
    `silent_s` (infinite: only their end counts). Setting `stopped` ends the wait for the others.

    Raises Refusal RENDEZVOUS_TIMEOUT when not all come in time, and INVALID for ranks that do not fit together.
    """
    if not 0 <= rank < world_size:
        raise invalid(
            f"rank {rank} is not in a trainer group of {world_size}; give a rank from 0 to {world_size - 1}"
        )
    if world_size == 1:
        return _only_rank(generation, device)
    try:
        host, port = split_address(rendezvous)
    except ServiceError as refused:
        raise invalid(f"rendezvous {refused.message}") from refused
    place = Place(host, int(port), listen or host, secret or secret_of(None, "", generation))
    deadline = time.monotonic() + timeout_s
    liveness = Liveness(rank, world_size, silent_s=silent_s)
    member = member or Member(f"rank {rank}", "", own_facts(device))
    stopped = stopped or threading.Event()
    forming = _Forming(place.port, deadline, stopped)
    error: Exception | None
    try:
        with forming.guarded():
            heard_at, _ = liveness.listen(place.listen, place.hello) if rank == 0 else (0, b"")
            met = meet(place, rank, world_size, deadline, member, heard_at, stopped)
            liveness.watch(
                host,
                met.liveness_port,
                place.hello,
                lambda ranks, why: forming.lose(ranks, why, on_lost, may_exit=silent_s < float("inf")),
            )
            return forming.form(generation, rank, world_size, device, met, liveness)
    except MeetingStopped as gone:
        error = gone
    except Failure as failure:
        error = RuntimeError(forming.lost) if forming.lost else failure
    except Refusal:
        liveness.close(in_order=False)
        raise
    liveness.close(in_order=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    if stopped.is_set():
        error = RuntimeError("nobody waits for it any more")
    raise late(generation, world_size, rendezvous, timeout_s, error) from error


class _Forming:
    """A group while its ranks make process groups: a rank that is lost meanwhile ends that, too."""

    def __init__(self, port: int, deadline: float, stopped: threading.Event) -> None:
        self.lost = ""
        self._port, self._deadline, self._stopped = port, deadline, stopped
        self._group: TrainerGroup | None = None
        self._lock = threading.Lock()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within its body no call to rank 0's store outlives the deadline: that of a stopped process never answers."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(GUARD_S):
                if self._stopped.is_set() or time.monotonic() > self._deadline:
                    connections.cut(frozenset(), self._port)

        guard = threading.Thread(target=look, name="meeting", daemon=True)
        guard.start()
        try:
            yield
        finally:
            over.set()
            guard.join()

    def form(
        self,
        generation: int,
        rank: int,
        world_size: int,
        device: torch.device,
        met: Meeting,
        liveness: Liveness,
    ) -> TrainerGroup:
        """The group. Raises what torch raises where a rank is gone."""
        self._deadline = max(self._deadline, time.monotonic() + LEAST_FORMING_S)
        limit = timedelta(seconds=self._deadline - time.monotonic())
        _init(met.store, rank, world_size, device, limit)
        group = TrainerGroup(generation, rank, world_size, device, forming=limit)
        group.members, group._liveness = met.members, liveness
        group.note_connections()
        # No deadline of the meeting holds for what comes now.
        for each, usual in (
            (None, COLLECTIVE_LIMIT),
            (group._headers, IDLE_LIMIT),
            (group._figures, COLLECTIVE_LIMIT),
        ):
            dist.distributed_c10d._set_pg_timeout(usual, each)
        with self._lock:
            if self.lost:
                raise RuntimeError(self.lost)
            self._group = group
        return group

    def lose(self, ranks: tuple[int, ...], reason: str, on_lost: OnLost, *, may_exit: bool) -> None:
        """A rank is lost, on the liveness thread."""
        with self._lock:
            group = self._group
            self.lost = reason
        if group is not None:
            group._lose(ranks, reason, on_lost, may_exit=may_exit)
        else:
            connections.cut(frozenset(), self._port)  # Whoever waits for a key of the store wakes.


def _only_rank(generation: int, device: torch.device) -> TrainerGroup:
    _init(HashStore(), 0, 1, device, COLLECTIVE_LIMIT)
    return TrainerGroup(generation, 0, 1, device)


def _init(store: Store, rank: int, world_size: int, device: torch.device, limit: timedelta) -> None:
    if device.type == "cuda":
        # Aborting is this group's own affair: torch's watchdog would end the process beside it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
