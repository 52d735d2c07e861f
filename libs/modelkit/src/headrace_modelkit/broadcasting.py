"""Pieces of bytes from one process to many at once, over a process group that lives as long as the broadcast.

Over Gloo each member passes on to the next what it got, so that a link carries them once, however many there are;
NCCL finds the way itself. Knows no versions and no digests; whoever uses it gives it a thread.
"""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

warnings.filterwarnings("ignore", message="The given buffer is not writable")

GLOO, NCCL = "gloo", "nccl"
BUCKET_BYTES = {GLOO: 8 << 20, NCCL: 64 << 20}
MOST_BYTES = 128 << 20
"""Of a piece: more is no broadcast's."""
MOST_UNDER_WAY = 3
"""Messages of Gloo: a piece with its size, and the next one's size."""
STALL_S = 5.0
"""A member that moves nothing for so long is lost, and the broadcast with it."""
FORMING_S = 30.0
"""NCCL connects its members in their first exchange."""
_POLL_S = 0.0002


def device_id(device: torch.device | None) -> str:
    """What a GPU is called in every process ("GPU-…"); empty for the CPU and for none."""
    if device is None or device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class Broadcasts:
    """A process's part in broadcasts. `device` tells the GPU that NCCL may use, or None."""

    def __init__(self, device: Callable[[], torch.device | None] = lambda: None) -> None:
        self._device = device

    def device_id(self) -> str:
        """See `device_id`; empty where NCCL is not there either."""
        return device_id(self._device()) if dist.is_nccl_available() else ""

    def serve(self, host: str) -> tuple[int, Any]:
        """Port of a new rendezvous store at `host`, of this machine, and the store, which lives while referenced."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server(
            (host, 0), family=family
        ) as server:  # torch's own would listen at all addresses.
            port = int(server.getsockname()[1])
            store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STALL_S),
                master_listen_fd=server.detach(),
            )
        return port, store

    def join(
        self, host: str, port: int, key: str, rank: int, size: int, backend: str, own_host: str
    ) -> Group:
        """Meets the others at the store of `host`; rank 0 sends. Raises RuntimeError where one does not come."""
        limit = timedelta(seconds=STALL_S)
        store = PrefixStore(key, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        if backend == NCCL:
            device = self._device()
            if device is None or device.type != "cuda":
                raise RuntimeError("NCCL needs a GPU, and this process has none now")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with torch.cuda.device(device):
                return Group(dist.ProcessGroupNCCL(store, rank, size, options), rank, size, device)
        gloo: Any = dist.ProcessGroupGloo
        chosen = gloo._Options()
        chosen._devices = [gloo.create_device(hostname=own_host)]
        chosen._timeout = limit
        return Group(gloo(store, rank, size, chosen), rank, size, None)


class _Room:
    """Where a piece arrives, and what still reads it there."""

    def __init__(self) -> None:
        self.size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.passed_on: list[Any] = []


class Group:
    """One broadcast. A failure raises RuntimeError, and leaves the group useless."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device | None) -> None:
        self._group, self._rank, self._size, self._device = group, rank, size, device
        self._limit_s = FORMING_S

    @property
    def bucket(self) -> int:
        """Bytes of a piece that keep the network busy."""
        return BUCKET_BYTES[NCCL if self._device is not None else GLOO]

    def send(self, pieces: Iterable[memoryview | bytes]) -> None:
        """Sends pieces of up to MOST_BYTES, and that there are no more."""
        with self._ending():
            sent: list[tuple[Any, Tensor]] = []
            for piece in chain(pieces, [b""]):
                size = torch.tensor([len(piece)], dtype=torch.int64, device="cpu")
                parts = [size, torch.frombuffer(piece, dtype=torch.uint8)] if len(piece) else [size]
                for part in parts:
                    if self._device is not None:
                        self._broadcast(part.to(self._device))
                    else:
                        sent.append((self._group.send([part], 1, 0), part))
                while (
                    len(sent) > MOST_UNDER_WAY
                ):  # The next ones are handed over while these are on their way.
                    _wait(sent.pop(0)[0])
            for work, _ in sent:
                _wait(work)

    def receive(self) -> Iterator[memoryview]:
        """The pieces; each holds until the one after the next is asked for."""
        with self._ending():
            rooms = [_Room(), _Room()]
            for room in cycle(rooms):
                for work in room.passed_on:
                    _wait(work)
                room.passed_on.clear()
                self._take(room.size, room)
                size = int(room.size)
                if not size:
                    break
                if size > MOST_BYTES:
                    raise RuntimeError(f"a piece of {size} bytes")
                if size > len(room.bytes):
                    room.bytes = torch.empty(
                        size, dtype=torch.uint8, device="cpu", pin_memory=self._device is not None
                    )
                part = room.bytes[:size]
                self._take(part, room)
                yield memoryview(part.numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
            for work in (work for room in rooms for work in room.passed_on):
                _wait(work)

    def _take(self, part: Tensor, room: _Room) -> None:
        """Fills it with what the member before sends, and passes that on."""
        if self._device is not None:
            part.copy_(self._broadcast(torch.empty_like(part, device=self._device)))
            return
        _wait(self._group.recv([part], self._rank - 1, 0))
        if self._rank + 1 < self._size:
            room.passed_on.append(self._group.send([part], self._rank + 1, 0))

    def _broadcast(self, part: Tensor) -> Tensor:
        with torch.cuda.device(self._device):
            self._await(self._group.broadcast([part], _from(0)))
        return part

    def _await(self, work: Any) -> None:
        """Waits on the host: of a dead peer's collective NCCL's own wait tells nothing."""
        deadline = time.monotonic() + self._limit_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing moved for {self._limit_s:g} s")
            time.sleep(_POLL_S)
        work.wait()
        self._limit_s = STALL_S

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._device is not None:
                self._group.abort()
            raise
        finally:
            self._group = None  # Gloo closes its connections, which the others notice at once.


def _wait(work: Any) -> None:
    work.wait(timedelta(seconds=STALL_S))


def _from(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options
