"""Parts of a checkpoint on their way to a leader whose disk a rank does not see, one tensor at a time.

Training waits for them: ranks that share the run's directory write beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace_trainer.checkpoints.files import write_safetensors
from headrace_trainer.checkpoints.parts import StateCopy, part_files, write_report
from headrace_trainer.group.group import TrainerGroup

Listed = list[tuple[str, str, tuple[int, ...]]]


class _Header(msgspec.Struct, frozen=True):
    """What a rank is about to send: (name, type, shape) of each tensor, by file, and the boxes."""

    weights: Listed
    optimizer: Listed
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def send_part(ranks: TrainerGroup, copy: StateCopy) -> None:
    """A follower's side."""
    header = _Header(_listed(copy.weights), _listed(copy.optimizer), dict(copy.boxes))
    body = msgspec.msgpack.encode(header)
    ranks.send(0, torch.tensor([len(body)]))
    ranks.send(0, torch.frombuffer(bytearray(body), dtype=torch.uint8))
    for tensor in (*copy.weights.values(), *copy.optimizer.values()):
        if tensor.numel():
            ranks.send(0, tensor.to("cpu"))


def relay_part(ranks: TrainerGroup, rank: int, directory: Path, *, durable: bool) -> None:
    """The leader's side: writes what a rank sends, and its report. What cannot be written is received all the same."""
    size = torch.zeros(1, dtype=torch.int64)
    ranks.receive(rank, size)
    body = torch.empty(int(size), dtype=torch.uint8)
    ranks.receive(rank, body)
    header = msgspec.msgpack.decode(body.numpy().tobytes(), type=_Header)
    report: dict[str, object] = {}
    files: dict[str, object] = {}
    names = part_files(rank, ranks.world_size)
    for file, listed in zip(names, (header.weights, header.optimizer), strict=True):
        pending = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, dtype, shape in listed
        }
        coming = dict(pending)

        def receive(name: str, coming: dict[str, Tensor] = coming) -> Tensor:
            found = torch.empty_like(coming.pop(name), device="cpu")
            if found.numel():
                ranks.receive(rank, found)
            return found

        try:
            files[file] = write_safetensors(
                directory / file, pending, header.boxes, durable=durable, value=receive
            )
        except OSError as error:
            report = {"error": str(error)}
            for name in list(coming):
                receive(name)
    write_report(directory, rank, report or {"files": files})


def _listed(tensors: Mapping[str, Tensor]) -> Listed:
    return [(name, str(own.dtype).removeprefix("torch."), tuple(own.shape)) for name, own in tensors.items()]
