"""A trainer group is formed: its ranks meet, make process groups, and hear each other meanwhile.

Nobody waits longer than the deadline for a rank that has died or stands still, in whichever of these it was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.errors import ServiceError
from torch._C._distributed_c10d import HashStore, Store

from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group import connections
from headrace_trainer.group.group import COLLECTIVE_LIMIT, IDLE_LIMIT, OnLost, TrainerGroup
from headrace_trainer.group.liveness import SILENT_S, Liveness
from headrace_trainer.group.meeting import Failure, Meeting, MeetingStopped, Member, late, meet, own_facts

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
    member: Member | None = None,
    on_lost: OnLost = lambda _members: None,
    stopped: threading.Event | None = None,
    silent_s: float = SILENT_S,
) -> TrainerGroup:
    """Meets the other ranks; rank 0 serves the rendezvous store at host:port.

    A single rank needs no rendezvous. `member` is this rank; `on_lost` hears of ranks that end, or are not heard for
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
    deadline = time.monotonic() + timeout_s
    liveness = Liveness(rank, world_size, silent_s=silent_s)
    member = member or Member(f"rank {rank}", "", own_facts(device))
    stopped = stopped or threading.Event()
    forming = _Forming(int(port), deadline, stopped)
    error: Exception | None
    try:
        with forming.guarded():
            heard_at = liveness.listen() if rank == 0 else (0, b"")
            address = host, int(port)
            met = meet(generation, rank, world_size, address, deadline, member, heard_at, stopped)
            liveness.watch(
                host,
                met.liveness_port,
                met.secret,
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
