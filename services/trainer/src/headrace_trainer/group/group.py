"""The ranks that own a model together: a process group per generation, and small exchanges on the CPU.

Knows no model and no step. Everything that travels is bytes or numbers, never an object.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby

import msgspec
import torch
import torch.distributed as dist
from headrace_servicekit.memory.allocator import resident_bytes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace_trainer.group import connections
from headrace_trainer.group.liveness import NO_MEMORY, Liveness
from headrace_trainer.memory import Room, Rooms, rooms_on

# A follower waits in the header broadcast while the leader is idle; LeaveTrainerGroup ends it, not this.
IDLE_LIMIT = timedelta(days=1)
COLLECTIVE_LIMIT = timedelta(minutes=10)
TOLD_S = 1.0
"""How long after a failed collective the liveness thread may take to say why."""
ABORTED_S = 30.0
"""A thread that is still in a collective so long after it was aborted cannot be woken: the process ends."""
ABORTED_EXIT_CODE = 71
BROADCAST_BYTES = 1 << 16
"""What all ranks get alike is passed on from rank to rank from this size on; less goes to each of them at once."""


class Member(msgspec.Struct, frozen=True):
    """One rank: its instance, and `facts` that must be the same on all of them, by what they are called for people."""

    name: str = ""
    incarnation: str = ""
    facts: dict[str, str] = {}


OnLost = Callable[[list[Member]], None]
"""Called on another thread with the ranks that are lost, as soon as it is noticed."""


class TrainerGroup:
    """One generation of ranks; rank 0 leads. A process is in at most one."""

    lost = ""
    """Why the group is over: another rank is lost. Raised to every caller that is in a collective, or comes to one."""
    members: Many[Member] = ()
    _liveness: Liveness | None = None
    _entered = 0

    def __init__(
        self,
        generation: int,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        forming: timedelta = COLLECTIVE_LIMIT,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        self._meshes: dict[int, DeviceMesh] = {world_size: self.mesh}
        # Headers wait for as long as the leader has nothing to do: a group of their own.
        self._headers = dist.new_group(backend="gloo", timeout=forming)
        self._figures = dist.new_group(backend="gloo", timeout=forming)
        self._connections: frozenset[connections.Ends] = frozenset()

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == 0

    def mesh_of(self, shard_ranks: int) -> DeviceMesh:
        """Copies × the ranks that hold one copy, which follow each other; `mesh` for all ranks. All ranks call it."""
        if shard_ranks not in self._meshes:
            shape = (self.world_size // shard_ranks, shard_ranks)
            self._meshes[shard_ranks] = init_device_mesh(
                self.device.type, shape, mesh_dim_names=("copies", "shards")
            )
        return self._meshes[shard_ranks]

    def least_rooms(self) -> tuple[Rooms, int]:
        """The least room that a rank has, and how many ranks a host has (all, unless each has as many in a row).

        All ranks call it.
        """
        own = rooms_on(self.device)
        device = own.device or Room("", 0, 0)
        resident, host = resident_bytes(), socket.gethostname()
        facts = host, resident, own.host.free - resident, own.host.total, device.free, device.total
        bodies = self.gather(msgspec.msgpack.encode(facts))
        hosts, residents, *sizes = zip(*(msgspec.msgpack.decode(body) for body in bodies), strict=True)
        available, host_total, free, total = map(min, sizes)
        # What any rank of a host holds is dropped before anything is loaded anew.
        own_bytes: Counter[str] = Counter()
        for name, size in zip(hosts, residents, strict=True):
            own_bytes[name] += size
        host_free = min(host_total, available + min(own_bytes.values()))
        least = Rooms(
            Room(own.host.name, host_free, host_total),
            None if own.device is None else Room(own.device.name, free, total),
        )
        runs = [len(list(same)) for _, same in groupby(hosts)]
        alike = len(runs) == len(set(hosts)) and len(set(runs)) == 1
        return least, runs[0] if alike else self.world_size

    # Small exchanges

    def announce(self, data: bytes | Many[bytes] | None) -> bytes:
        """The leader's bytes for this rank: the same for all, or a list with an entry a rank. Followers pass None.

        Raises RuntimeError when a rank is gone.
        """
        if self.world_size == 1:
            assert data is not None
            return data if isinstance(data, bytes) else data[0]
        with self.in_collective():
            return self._receive() if data is None else self._send(data)

    def _send(self, data: bytes | Many[bytes]) -> bytes:
        alike = data if isinstance(data, bytes) else None
        passed_on = alike is not None and len(alike) >= BROADCAST_BYTES
        sent: list[tuple[dist.Work, Tensor]] = []
        for rank in range(1, self.world_size):
            own = data if isinstance(data, bytes) else data[rank]
            sizes = torch.tensor([0, len(own)] if passed_on else [len(own), 0], dtype=torch.int64)
            sent.append((_sending(sizes, rank, self._headers), sizes))
            if not passed_on:
                body = _tensor(own)
                sent.append((_sending(body, rank, self._headers), body))
        for work, _ in sent:
            work.wait(COLLECTIVE_LIMIT)
        if passed_on:
            assert alike is not None
            dist.broadcast(_tensor(alike), 0, group=self._headers)
        return data if isinstance(data, bytes) else data[0]

    def _receive(self) -> bytes:
        sizes = torch.empty(2, dtype=torch.int64)
        _wait_for(sizes, 0, self._headers, IDLE_LIMIT)
        own, alike = map(int, sizes.tolist())
        body = torch.empty(own or alike, dtype=torch.uint8)
        if own:
            _wait_for(body, 0, self._headers)
        elif alike:
            dist.broadcast(body, 0, group=self._headers)
        return body.numpy().tobytes()

    def all_true(self, flag: bool) -> bool:
        """Whether every rank says true."""
        if self.world_size == 1:
            return flag
        votes = torch.tensor([1 if flag else 0], dtype=torch.int64)
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._figures)
        return bool(votes.item())

    def votes(self, *flags: bool) -> list[list[bool]]:
        """Everyone's flags by rank, on every rank."""
        if self.world_size == 1:
            return [list(flags)]
        own = torch.tensor(flags, dtype=torch.bool)
        found = [torch.zeros_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self._figures)
        return [vote.tolist() for vote in found]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Adds up values by name over the ranks, in the order of the ranks."""
        total: dict[str, float] = {}
        for found in self._gather_values(values):
            for name, value in found.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def maximum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Greatest values by name over the ranks."""
        total: dict[str, float] = {}
        for found in self._gather_values(values):
            for name, value in found.items():
                total[name] = max(total.get(name, value), value)
        return total

    def gather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes by rank, on every rank."""
        if self.world_size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=self._figures)
        longest = max(int(size) for size in sizes)
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(bodies, _tensor(data.ljust(longest, b"\0")), group=self._figures)
        return [body.numpy().tobytes()[: int(size)] for body, size in zip(bodies, sizes, strict=True)]

    def gather_on_leader(self, data: bytes) -> list[bytes]:
        """Everyone's bytes by rank, on the leader; nothing on the others."""
        if self.world_size == 1:
            return [data]
        if not self.leads:
            for part in (torch.tensor([len(data)], dtype=torch.int64), _tensor(data)):
                _sending(part, 0, self._figures).wait(COLLECTIVE_LIMIT)
            return []
        found = [data]
        for rank in range(1, self.world_size):
            size = torch.empty(1, dtype=torch.int64)
            _wait_for(size, rank, self._figures)
            body = torch.empty(int(size), dtype=torch.uint8)
            _wait_for(body, rank, self._figures)
            found.append(body.numpy().tobytes())
        return found

    def share(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with the leader's, on the trainer group's device."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def send(self, rank: int, tensor: Tensor) -> None:
        """Gives another rank a tensor on the CPU; that rank calls `receive`."""
        _sending(_bytes(tensor), rank, self._figures).wait(COLLECTIVE_LIMIT)

    def receive(self, rank: int, tensor: Tensor) -> None:
        """Overwrites a contiguous tensor on the CPU with what another rank sends."""
        _wait_for(_bytes(tensor), rank, self._figures)

    def _gather_values(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        if self.world_size == 1:
            return [dict(values)]
        bodies = self.gather(msgspec.msgpack.encode(dict(values)))
        return [msgspec.msgpack.decode(body, type=dict[str, float]) for body in bodies]

    # Its end

    def note_connections(self) -> None:
        """All ranks: finds which connections `abort` cuts. Again after other process groups were made."""
        if self.world_size == 1:
            return
        own = connections.own_connections()
        bodies = self.gather(msgspec.msgpack.encode(own))
        others = [
            ends
            for rank, body in enumerate(bodies)
            if rank != self.rank
            for ends in msgspec.msgpack.decode(body, type=list[connections.Ends])
        ]
        self._connections = connections.between(own, others)

    @contextmanager
    def in_collective(self) -> Iterator[None]:
        """Within its body this thread may wait for the other ranks: it has to come out soon after `abort`."""
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    def abort(self, reason: str) -> None:
        """Wakes whoever waits for the other ranks, from another thread: what they were at fails, and so does the next.

        NCCL's communicators are aborted by torch; Gloo has no abort, so its connections are cut.
        """
        if self.lost:
            return
        self.lost = reason
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        connections.cut(self._connections)

    def end_without_memory(self) -> None:
        """Ends the group because this rank's device has no memory left: whoever waits for it hears that."""
        if self._liveness is not None:
            self._liveness.close(no_memory=True)
        self.abort(f"rank {self.rank} {NO_MEMORY}")

    @property
    def lost_for_memory(self) -> bool:
        """Whether the group is over because a rank's device had no memory left."""
        return NO_MEMORY in self.lost

    def why_lost(self) -> str:
        """Why the group has ended, after a collective of it has failed; empty where nobody says so.

        Gloo may notice a closed connection a moment before the liveness thread has read who closed it and why.
        """
        end = time.monotonic() + TOLD_S
        while not self.lost and self._liveness is not None and time.monotonic() < end:
            time.sleep(0.01)
        return self.lost

    def leave(self, *, in_order: bool = True) -> None:
        """Ends the process group; what was sharded over it can no longer communicate.

        Unless it is `in_order` the other ranks take this one for lost.
        """
        if self._liveness is not None:
            self._liveness.close(in_order=in_order and not self.lost)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _lose(self, ranks: tuple[int, ...], reason: str, on_lost: OnLost, *, may_exit: bool) -> None:
        """Aborts the group, says which ranks are lost, and sees that this process's thread wakes."""
        self.abort(reason)
        on_lost([self.members[rank] for rank in ranks])
        end = time.monotonic() + ABORTED_S
        while self._entered and time.monotonic() < end:
            time.sleep(0.05)
        if self._entered and may_exit:
            sys.stderr.write(
                f"headrace-trainer: rank {self.rank} of generation {self.generation} waits in a collective "
                f"{ABORTED_S:g} s after it was aborted ({reason}); exiting\n"
            )
            sys.stderr.flush()
            os._exit(ABORTED_EXIT_CODE)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


# A wait for what one rank sends another has a limit of its own: without one it is that of the connections, which were
# made under the meeting's deadline. The group's limit, which is set after the meeting, is of collectives alone.


def _sending(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.isend(tensor, rank, group=group)
    assert work is not None
    return work


def _wait_for(
    tensor: Tensor, rank: int, group: dist.ProcessGroup, limit: timedelta = COLLECTIVE_LIMIT
) -> None:
    work = dist.irecv(tensor, rank, group=group)
    assert work is not None
    work.wait(limit)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
