"""Parts of a micro-batch through the stages by Megatron's schedules: one forward, one backward (1F1B).

A stage keeps the activations of as many parts as there are stages from itself on, at most. All stages pack the same
parts, so each knows the lengths of the messages that come to it, and none has to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from headrace_trainer.learning.packing import MicroBatch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from headrace_megatron.model import ParallelModel

Finish = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]
"""Of the hidden states that leave the last stage: (what goes backward, what is returned)."""


class _Neighbours(P2PCommunicator):  # type: ignore[misc]  # Megatron is not annotated
    """Megatron's messages between stages, but for their shapes: it would ask for each, and wait for the device."""

    def expect(self, shapes: Many[tuple[int, int, int]], chunks: int) -> None:
        """The shapes of the parts that come next."""
        size, rank = self.pp_group.size(), self.pp_group.rank()
        order = [(part, chunk) for part, chunk in get_schedule_table(len(shapes), chunks, size)]
        # The first stage receives from the last one what is not through all chunks yet; gradients go the other way.
        round_again = [part for part, chunk in order if chunk < chunks - 1]
        every = [part for part, _ in order]
        self._forward = iter([shapes[part] for part in (every if rank else round_again)])
        self._backward = iter([shapes[part] for part in (round_again if rank == size - 1 else every)])

    def _communicate_shapes(
        self, send_next: Tensor | None, send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        none = [0, 0, 0]
        return next(self._forward) if recv_prev else none, next(self._backward) if recv_next else none


class Pipeline:
    """The stages of one replica, each with its neighbours."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        groups, layout = model.groups, model.groups.layout
        self._neighbours = _Neighbours(groups.pipeline, model.config)
        virtual = layout.virtual if layout.virtual > 1 else None
        self._schedule = get_forward_backward_func(layout.pipeline, virtual)
        self._collection = ProcessGroupCollection(
            tp=groups.tensor,
            cp=groups.context,
            pp=groups.pipeline,
            embd=None,
            pos_embd=None,
            dp_cp=groups.sum,
        )
        self.most_kept = 0
        """The most parts whose activations this stage has kept at a time, by chunk of layers."""
        self._kept = 0

    def run(self, parts: Many[MicroBatch], finish: Finish, *, backward: bool) -> list[Any]:
        """What `finish` returns of each part, on the last stage; with `backward` gradients are accumulated."""
        model = self._model
        self._neighbours.expect([model.message_shape(part) for part in parts], len(model.modules))

        def forward(iterator: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            hidden = model.forward(module, batch)
            if backward:
                self._kept += 1
                self.most_kept = max(self.most_kept, self._kept)
                hidden.register_hook(partial(self._goes_backward, batch))  # type: ignore[no-untyped-call]
            return hidden, partial(self._finish, finish, batch)

        with torch.set_grad_enabled(backward), self._waiting(backward):
            found: list[Any] = self._schedule(
                forward_step_func=forward,
                data_iterator=[iter(parts) for _ in model.modules],
                model=model.modules,
                num_microbatches=len(parts),
                seq_length=0,  # `_Neighbours` knows the lengths
                micro_batch_size=1,
                forward_only=not backward,
                p2p_communicator=self._neighbours,
                pg_collection=self._collection,
            )
        return found

    @contextmanager
    def _waiting(self, backward: bool) -> Iterator[None]:
        """A schedule that only goes forward would leave gradients waiting for the last part after it."""
        config = self._model.config
        waits = config.no_sync_func
        config.no_sync_func = waits if backward else None
        try:
            yield
        finally:
            config.no_sync_func = waits

    def forget(self) -> None:
        """Drops what a run that was interrupted has left."""
        self._kept = 0

    def _goes_backward(self, batch: MicroBatch, _: Tensor) -> None:
        self._kept -= 1
        self._model.tell(batch)  # whose layers may be computed again

    def _finish(self, finish: Finish, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        """With a number of tokens, by which Megatron would divide the gradient if it were told to."""
        loss, found = finish(hidden, batch)
        return loss, torch.zeros((), dtype=torch.int, device=hidden.device), found
