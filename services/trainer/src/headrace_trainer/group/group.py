"""The ranks that own a model together: a process group per generation, and small exchanges on the CPU.

Knows no model and no step. Everything that travels is bytes or numbers, never an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace_trainer.errors import Refusal, invalid

# A follower waits in the header broadcast while the leader is idle; LeaveTrainerGroup ends it, not this.
IDLE_LIMIT = timedelta(days=1)
COLLECTIVE_LIMIT = timedelta(minutes=10)


class TrainerGroup:
    """One generation of ranks; rank 0 leads. A process is in at most one."""

    def __init__(self, generation: int, rank: int, world_size: int, device: torch.device) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        # Headers wait for as long as the leader has nothing to do: a group of their own.
        self._headers = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
        self._figures = dist.new_group(backend="gloo", timeout=COLLECTIVE_LIMIT)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == 0

    def announce(self, data: bytes | None) -> bytes:
        """Broadcasts the leader's bytes; followers pass None. Raises RuntimeError when a rank is gone."""
        if self.world_size == 1:
            assert data is not None
            return data
        size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._headers)
        body = torch.empty(int(size), dtype=torch.uint8) if data is None else _tensor(data)
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

    def share(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with the leader's, on the trainer group's device."""
        if self.world_size > 1:
            dist.broadcast(tensor, 0)

    def send(self, rank: int, tensor: Tensor) -> None:
        """Gives another rank a tensor on the CPU; that rank calls `receive`."""
        dist.send(_bytes(tensor), rank, group=self._figures)

    def receive(self, rank: int, tensor: Tensor) -> None:
        """Overwrites a contiguous tensor on the CPU with what another rank sends."""
        dist.recv(_bytes(tensor), rank, group=self._figures)

    def leave(self) -> None:
        """Ends the process group; what was sharded over it can no longer communicate."""
        dist.destroy_process_group()

    def _gather_values(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        if self.world_size == 1:
            return [dict(values)]
        bodies = self.gather(msgspec.msgpack.encode(dict(values)))
        return [msgspec.msgpack.decode(body, type=dict[str, float]) for body in bodies]


def join_trainer_group(
    generation: int, rank: int, world_size: int, rendezvous: str, timeout_s: float, device: torch.device
) -> TrainerGroup:
    """Meets the other ranks; rank 0 serves the rendezvous store at host:port.

    A single rank needs no rendezvous. Raises Refusal RENDEZVOUS_TIMEOUT when not all come in time.
    """
    if not 0 <= rank < world_size:
        raise invalid(
            f"rank {rank} is not in a trainer group of {world_size}; give a rank from 0 to {world_size - 1}"
        )
    store: Store
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        store = HashStore()
    else:
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdigit():
            raise invalid(f"rendezvous {rendezvous!r} is no address; give host:port of rank 0")
        store = _meet(host, int(port), rank, world_size, timeout)
    # A late rank of an older generation must not meet this one's keys.
    keys = PrefixStore(f"generation-{generation}", store)
    try:
        dist.init_process_group(
            backend, store=keys, rank=rank, world_size=world_size, timeout=COLLECTIVE_LIMIT
        )
        return TrainerGroup(generation, rank, world_size, device)
    except (RuntimeError, dist.DistNetworkError) as error:
        raise _late(generation, world_size, rendezvous, timeout_s, error) from error


def _meet(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    try:
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=True)
    except (RuntimeError, dist.DistNetworkError) as error:
        raise _late(-1, world_size, f"{host}:{port}", timeout.total_seconds(), error) from error
    return store


def _late(generation: int, world_size: int, rendezvous: str, timeout_s: float, error: Exception) -> Refusal:
    reason = str(error).splitlines()[0]
    return Refusal(
        "RENDEZVOUS_TIMEOUT",
        f"trainer group generation {generation} of {world_size} ranks did not meet at {rendezvous} in "
        f"{timeout_s:g} s: {reason}",
        "unavailable",
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
