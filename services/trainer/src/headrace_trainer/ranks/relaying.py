"""A rank's part of a checkpoint: written where the rank sees the run's directory, else sent to the leader.

Training waits for what is sent, one tensor at a time; what a rank writes itself it writes beside training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace_trainer.backends.policies import Backends
from headrace_trainer.checkpoints.files import write_safetensors
from headrace_trainer.checkpoints.parts import (
    PartWriter,
    StateCopy,
    copy_state,
    part_files,
    write_and_report,
    write_part,
    write_report,
)
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.ranks.messages import SnapshotRound

Listed = list[tuple[str, str, tuple[int, ...]]]


class _Header(msgspec.Struct, frozen=True):
    """What a rank is about to send: (name, type, shape) of each tensor, by file, and the boxes."""

    weights: Listed
    optimizer: Listed
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def save_part(
    backends: Backends, ranks: TrainerGroup, writer: PartWriter, runs: Path, round: SnapshotRound
) -> StateCopy | None:
    """Copies this rank's part; the leader gets its own. A rank that does not see the directory sends its part."""
    directory, own, size, leads = runs / round.directory, ranks.rank, ranks.world_size, ranks.leads
    writer.wait()
    seen = [found for [found] in ranks.votes(directory.is_dir())]
    copy = copy_state(
        backends.weight_parts(),
        backends.moment_parts(leads=leads),
        backends[""].optimizer_steps,
        in_place=round.in_place,
        leads=leads,
    )
    if leads:
        for rank in (rank for rank in range(1, size) if not seen[rank]):
            _relay_part(ranks, rank, directory, durable=round.durable)
        if not round.in_place:
            return copy
        files = write_part(directory, copy, own, size, durable=round.durable)
        return StateCopy({}, {}, copy.optimizer_steps, files=files)
    if not seen[own]:
        _send_part(ranks, copy)
    elif round.in_place:
        write_and_report(directory, copy, own, size, round.durable)
    else:
        writer.start(directory, copy, own, size, durable=round.durable)
    return None


def _send_part(ranks: TrainerGroup, copy: StateCopy) -> None:
    """A follower's side."""
    header = _Header(_listed(copy.weights), _listed(copy.optimizer), dict(copy.boxes))
    body = msgspec.msgpack.encode(header)
    ranks.send(0, torch.tensor([len(body)]))
    ranks.send(0, torch.frombuffer(bytearray(body), dtype=torch.uint8))
    for tensor in (*copy.weights.values(), *copy.optimizer.values()):
        if tensor.numel():
            ranks.send(0, tensor.to("cpu"))


def _relay_part(ranks: TrainerGroup, rank: int, directory: Path, *, durable: bool) -> None:
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
