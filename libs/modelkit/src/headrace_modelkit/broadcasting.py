"""A body from one process to many at once, over a process group that lives as long as the broadcast.

Over Gloo each member passes on to the next what it got, so that a link carries the body once, however many there are;
NCCL finds the way itself. Knows no versions and no digests; whoever uses it gives it a thread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

warnings.filterwarnings("ignore", message="The given buffer is not writable")

GLOO, NCCL = "gloo", "nccl"
BUCKET_BYTES = {GLOO: 8 << 20, NCCL: 64 << 20}
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
        """Port of a new rendezvous store, and the store, which lives while it is referenced."""
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STALL_S))
        return store.port, store

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


class Group:
    """One broadcast. A failure raises RuntimeError, and leaves the group useless."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device | None) -> None:
        self._group, self._rank, self._size, self._device = group, rank, size, device
        self._limit_s = FORMING_S
        self._bucket = BUCKET_BYTES[NCCL if device is not None else GLOO]

    def send(self, body: memoryview, goes_on: Callable[[int], bool]) -> None:
        """Sends a body; `goes_on` is asked before each bucket, with its end."""
        with self._ending():
            whole = torch.frombuffer(body, dtype=torch.uint8)
            sent: list[Any] = []
            for offset in range(0, len(body), self._bucket):
                if not goes_on(min(offset + self._bucket, len(body))):
                    raise RuntimeError("the broadcast was ended")
                part = whole[offset : offset + self._bucket]
                if self._device is not None:
                    with torch.cuda.device(self._device):
                        self._await(self._group.broadcast([part.to(self._device)], _from(0)))
                    continue
                if len(sent) == 2:  # One is on its way while the next one is handed over.
                    _wait(sent.pop(0))
                sent.append(self._group.send([part], 1, 0))
            for work in sent:
                _wait(work)

    def receive(self, size: int) -> Iterator[memoryview]:
        """The pieces of a body of `size` bytes; each holds until the one after the next is asked for."""
        with self._ending():
            buckets = [self._bucket_of(min(size, self._bucket)) for _ in range(2)]
            passed_on: list[Any] = [None, None]
            last = self._rank + 1 == self._size
            for index, offset in enumerate(range(0, size, self._bucket)):
                place = index % 2
                part = buckets[place][: min(self._bucket, size - offset)]
                if passed_on[place] is not None:
                    _wait(passed_on[place])
                if self._device is not None:
                    self._from_device(part)
                else:
                    _wait(self._group.recv([part], self._rank - 1, 0))
                    passed_on[place] = None if last else self._group.send([part], self._rank + 1, 0)
                yield memoryview(part.numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
            for work in passed_on:
                if work is not None:
                    _wait(work)

    def _bucket_of(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._device is not None)

    def _from_device(self, part: Tensor) -> None:
        with torch.cuda.device(self._device):
            arrived = torch.empty(len(part), dtype=torch.uint8, device=self._device)
            self._await(self._group.broadcast([arrived], _from(0)))
            part.copy_(arrived)

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
