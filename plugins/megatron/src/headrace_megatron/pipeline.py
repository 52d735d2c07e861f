"""Micro-batches through the stages: all forward, then all backward, so that a loss can be refused before any gradient.

The parts of one micro-batch follow each other; what they keep for the backward pass is bounded by the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from headrace_trainer.learning.packing import MicroBatch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from headrace_megatron.model import ParallelModel


@dataclass(frozen=True)
class Passed:
    """One part after its forward: what this stage received (None on the first) and computed."""

    batch: MicroBatch
    received: Tensor | None
    hidden: Tensor


class Pipeline:
    """The stages of one replica, each with its neighbours."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._groups = model.groups
        self._neighbours = P2PCommunicator(self._groups.pipeline, model.config)

    def forward(self, parts: list[MicroBatch]) -> Iterator[Passed]:
        """Each part in turn, once it has left this stage."""
        groups = self._groups
        for batch in parts:
            shape = self._model.message_shape(batch)
            received = self._neighbours.recv_forward(shape, groups.first_stage)
            hidden = self._model.forward(batch, received)
            self._neighbours.send_forward(hidden.detach(), groups.last_stage)
            yield Passed(batch, received, hidden)

    def backward(self, passed: list[Passed], losses: list[Tensor]) -> None:
        """Accumulates the gradient of all parts; `losses` are theirs, on the last stage alone."""
        groups = self._groups
        for index, part in enumerate(passed):
            upstream = self._neighbours.recv_backward(part.hidden.shape, groups.last_stage)
            self._model.tell(part.batch)
            end = losses[index] if groups.last_stage else part.hidden
            torch.autograd.backward(end, upstream)
            gradient = part.received.grad if part.received is not None else None
            self._neighbours.send_backward(gradient, groups.first_stage)
