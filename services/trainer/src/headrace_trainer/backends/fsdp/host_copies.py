"""Tensors of a device on the host, one after another: the next one is on its way while the one before is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class HostCopies:
    """Two buffers that stay, in memory that a GPU copies into by itself; each is as large as its largest tensor."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copies in order; each holds until the next one is asked for."""
        before: tuple[str, Tensor, torch.cuda.Event | None] | None = None
        for index, (name, tensor) in enumerate(tensors):
            copy = self._room(index % 2, tensor)
            copy.copy_(tensor, non_blocking=self._pins)
            done = torch.cuda.Event() if self._pins else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record(torch.cuda.current_stream(tensor.device))
            if before is not None:
                yield _awaited(*before)
            before = name, copy, done
        if before is not None:
            yield _awaited(*before)

    def _room(self, index: int, like: Tensor) -> Tensor:
        if self._buffers[index].nbytes < like.nbytes:
            self._buffers[index] = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=self._pins)
        return self._buffers[index][: like.nbytes].view(like.dtype).view(like.shape)


def _awaited(name: str, copy: Tensor, done: torch.cuda.Event | None) -> tuple[str, Tensor]:
    if done is not None:
        done.synchronize()
    return name, copy
