"""Frozen weights below adapters that the trainers and rollouts of a host share: one file of memory, mapped by all.

Only one rank that computes on the CPU has them whole and in the memory that others can map. Knows no forward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.model_files import fingerprint
from headrace_modelkit.tensor_files import Tensors
from headrace_modelkit.weights import ALIGNMENT_BYTES, CheckpointNames
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.weights.bases import Bases
from headrace_servicekit.weights.versions import PendingWeights, StoredWeights
from torch import Tensor

from headrace_trainer.backends.shared.casting import DATA_TYPES, cast_into
from headrace_trainer.group.group import TrainerGroup


def shares_base(config: TrainerConfig, ranks: int, *, on_gpu: bool) -> bool:
    """Whether a run's frozen weights are the host's, for which it has to be one rank on a CPU, with rollouts."""
    section = config.trainer
    plain = section.lora is not None and section.lora.quantization is None and section.draft is None
    return plain and config.installed and ranks == 1 and not on_gpu


def base_mark(config: TrainerConfig, ranks: TrainerGroup) -> str | None:
    """What tells, without reading them, whether a run's frozen weights are resident; None where they are not shared."""
    if not shares_base(config, ranks.world_size, on_gpu=ranks.device.type != "cpu"):
        return None
    found = fingerprint(config.model)
    return found and f"{found}-{config.model.dtype}"


@dataclass(frozen=True)
class ResidentBase:
    """What a run's frozen weights are: their digest as they are read, and their tensors as they are published."""

    path: str
    digest: str
    layout: list[tuple[str, str, tuple[int, ...]]]
    names: CheckpointNames

    def take(self, bases: Bases, source: Tensors, mark: str) -> StoredWeights:
        """The host's copy, read from `source` where there is none yet.

        Raises ModelNotReadable where the files are others by now than they were when `digest` was taken.
        """
        published = self.names.layout(self.layout)
        types = {name: getattr(torch, kind) for name, kind, _ in published}

        def write(body: PendingWeights) -> dict[str, str]:
            own, found = xxhash.xxh3_128(), dict[str, str]()
            for name, _, _ in self.layout:
                whole = source.read(name)
                own.update(name.encode())
                own.update(memoryview(whole.flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
                parts = [each for each in self.names.split(name, whole) if each[1].numel()]
                found |= cast_into([(part, tensor, body.buffer(part)) for part, tensor in parts], types)
            if own.hexdigest() != self.digest:
                raise ModelNotReadable(
                    f"model.path: the files at {self.path!r} changed while they were read; leave them as they are and "
                    "start again"
                )
            return found

        layout = [(name, DATA_TYPES[kind], shape) for name, kind, shape in published]
        return bases.take(digest_bytes(f"{self.digest} {published}".encode()), layout, write, mark=mark)

    def views(self, base: StoredWeights) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors in the shared memory, where they lie even; they are only read."""
        offset = 0
        for name, kind, shape in self.layout:  # what files have in several pieces lies piece behind piece
            dtype: torch.dtype = getattr(torch, kind)
            first, offset = offset, offset + math.prod(shape) * dtype.itemsize
            if first % ALIGNMENT_BYTES == 0 and offset > first:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of a buffer that is read-only
                    yield name, torch.frombuffer(base.body[first:offset], dtype=dtype).view(shape)
