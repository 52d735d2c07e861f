"""Whole tensors of what every rank saves of a state."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from headrace_modelkit.tensor_files import slices, volume
from headrace_trainer.backends._base import StatePart
from headrace_trainer.group.group import TrainerGroup


def whole_state(ranks: TrainerGroup, parts: Iterable[StatePart]) -> dict[str, torch.Tensor]:
    """By name, on every rank; all call it. Fails where the parts do not make up the tensors, each element once."""
    own = []
    for part in parts:
        value = part.value.detach().cpu().contiguous()
        assert list(value.shape) == [end - first for first, end in part.box], part.name
        data = value.flatten().view(torch.uint8).numpy().tobytes()
        own.append((part.name, part.shape, part.box, str(value.dtype).removeprefix("torch."), data))
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for body in ranks.gather(msgspec.msgpack.encode(own)):
        for name, shape, box, dtype, data in msgspec.msgpack.decode(body):
            kind = getattr(torch, dtype)
            whole = found.setdefault(name, torch.zeros(shape, dtype=kind))
            sizes = [end - first for first, end in box]
            if data:
                whole[slices(box)] = torch.frombuffer(bytearray(data), dtype=kind).view(sizes)
            filled[name] = filled.get(name, 0) + volume(box)
    assert filled == {name: whole.numel() for name, whole in found.items()}
    return found
