"""Pieces of bytes from one process to many at once, over a process group that lives as long as the broadcast.

Over Gloo each member passes on to the next what it got, so that a link carries them once, however many there are;
NCCL finds the way itself. Knows no versions and no digests; whoever uses it gives it a thread.
"""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import chain, cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from headrace_modelkit.pinned import Rooms, flat_bytes

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
    """Where a piece arrives, and what still reads it there; `given`: memory of somebody else's, of a fixed size."""

    def __init__(self, given: Tensor | None = None) -> None:
        self.size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu") if given is None else given
        self.passed_on: list[Any] = []
        self._fixed = given is not None

    def of(self, size: int, *, pins: bool) -> Tensor:
        """Room for a piece of `size` bytes. Raises RuntimeError."""
        if size > (len(self.bytes) if self._fixed else MOST_BYTES):
            raise RuntimeError(f"a piece of {size} bytes")
        if size > len(self.bytes):
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pins)
        return self.bytes[:size]


class Group:
    """One broadcast, torn down when all members have its last piece. A failure raises RuntimeError, and leaves the
    group useless.
    """

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
            if self._device is not None:
                self._send_from(self._device, pieces)
                return
            sent: list[tuple[Any, Tensor]] = []
            for piece in chain(pieces, [b""]):
                size = torch.tensor([len(piece)], dtype=torch.int64, device="cpu")
                parts = [size, torch.frombuffer(piece, dtype=torch.uint8)] if len(piece) else [size]
                sent += [(self._group.send([part], 1, 0), part) for part in parts]
                while (
                    len(sent) > MOST_UNDER_WAY
                ):  # The next ones are handed over while these are on their way.
                    _wait(sent.pop(0)[0])
            for work, _ in sent:
                _wait(work)

    def receive(self, given: Sequence[Tensor] = ()) -> Iterator[memoryview]:
        """The pieces; each holds until the one after the next is asked for. `given`: two rooms that they come to."""
        with self._ending():
            rooms = [_Room(own) for own in given] or [_Room(), _Room()]
            if self._device is not None:
                yield from self._receive_on(self._device, rooms)
                return
            for room in cycle(rooms):
                for work in room.passed_on:
                    _wait(work)
                room.passed_on.clear()
                self._take(room.size, room)
                size = int(room.size)
                if not size:
                    break
                part = room.of(size, pins=False)
                self._take(part, room)
                yield _view(part)
            for work in (work for room in rooms for work in room.passed_on):
                _wait(work)

    def _take(self, part: Tensor, room: _Room) -> None:
        """Fills it with what the member before sends, and passes that on."""
        _wait(self._group.recv([part], self._rank - 1, 0))
        if self._rank + 1 < self._size:
            room.passed_on.append(self._group.send([part], self._rank + 1, 0))

    def _send_from(self, device: torch.device, pieces: Iterable[memoryview | bytes]) -> None:
        """While a piece is on its way the next one goes up to the GPU, through pinned memory."""
        rooms, staged, under_way = Rooms(device), [_empty(device), _empty(device)], list[Any]()
        for index, piece in enumerate(chain(pieces, [b""])):
            if index > 1:
                self._await(under_way.pop(0))
            if len(piece) > len(staged[index % 2]):
                staged[index % 2] = torch.empty(len(piece), dtype=torch.uint8, device=device)
            part = staged[index % 2][: len(piece)]
            rooms.upload(flat_bytes(memoryview(piece)), part)
            size = torch.tensor([len(piece)], dtype=torch.int64, device="cpu").to(device)
            works = [self._broadcast(each) for each in ((size, part) if len(piece) else (size,))]
            under_way.append(works[-1])
        for work in under_way:
            self._await(work)

    def _receive_on(self, device: torch.device, rooms: Sequence[_Room]) -> Iterator[memoryview]:
        """While a piece comes to the GPU the one before goes down to its room."""
        staged, before = [_empty(device), _empty(device)], None
        for index, room in cycle(enumerate(rooms)):
            size = torch.zeros(1, dtype=torch.int64, device=device)
            self._await(self._broadcast(size))
            if count := int(size):
                part = room.of(count, pins=device.type == "cuda")
                if count > len(staged[index]):
                    staged[index] = torch.empty(count, dtype=torch.uint8, device=device)
                work = self._broadcast(staged[index][:count])
            if before is not None:
                _done(before[1])
                yield _view(before[0])
            if not count:
                return
            self._await(work)
            part.copy_(staged[index][:count], non_blocking=device.type == "cuda")
            before = part, _mark(device)

    def _broadcast(self, part: Tensor) -> Any:
        with _on(self._device):
            return self._group.broadcast([part], _from(0))

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
        """Ends the group: of a broken one at once, else when all have the last piece, which may still be on its way."""
        met = False
        try:
            yield
            with suppress(RuntimeError):  # One that is lost now has cost the others nothing.
                self._meet()
                met = True
        finally:
            group, self._group = (
                self._group,
                None,
            )  # Gloo closes its connections, which the others notice at once.
            if self._device is not None:
                (group.shutdown if met else group.abort)()

    def _meet(self) -> None:
        here = torch.zeros(1, device=self._device or "cpu")
        with _on(self._device):
            work = self._group.allreduce([here])
        if self._device is not None:
            self._await(work)
        else:
            _wait(work)


def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _view(part: Tensor) -> memoryview:
    return memoryview(part.numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer


def _on(device: torch.device | None) -> AbstractContextManager[Any]:
    gpu = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if gpu else nullcontext()


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """The end of what was asked of a GPU so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _done(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


def _wait(work: Any) -> None:
    work.wait(timedelta(seconds=STALL_S))


def _from(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options
