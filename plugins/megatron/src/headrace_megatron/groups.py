"""The process groups of Megatron for one generation of a trainer group, and this rank's places in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from headrace_trainer.group.group import COLLECTIVE_LIMIT, TrainerGroup
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from headrace_megatron.layout import Layout

_applied = False
"""Whether `run_without_gpu` has patched this process."""
_made_for: tuple[TrainerGroup, Layout] | None = None
"""Megatron keeps its groups in globals, one set a process."""


@dataclass(frozen=True)
class Groups:
    """Groups of this rank. `sum` is over those that have the same weights: replicas, and context-parallel ranks."""

    layout: Layout
    tensor: ProcessGroup
    pipeline: ProcessGroup
    context: ProcessGroup
    sum: ProcessGroup
    embedding: ProcessGroup | None
    """The first stage and the last one, on those two."""
    expert: ProcessGroup
    """The ranks that divide the experts."""
    expert_sum: ProcessGroup
    """Those that have the same experts."""

    @property
    def stage(self) -> int:
        """Place among the stages."""
        return self.pipeline.rank()

    @property
    def first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        """Whether the head is here."""
        return self.stage == self.layout.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's figures count: one of each replica."""
        return self.last_stage and self.routes_alone and self.context.rank() == 0

    @property
    def routes_alone(self) -> bool:
        """Whether this rank's counts of experts count: one of those that have the same tokens and layers."""
        return self.tensor.rank() == 0

    def gather_tensor_parallel(self, own_N: Tensor) -> Tensor:
        """(ranks, N) of the tensor-parallel ranks."""
        found = [torch.empty_like(own_N) for _ in range(self.layout.tensor)]
        dist.all_gather(found, own_N.contiguous(), group=self.tensor)
        return torch.stack(found)

    def share_from_last_stage(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with the last stage's."""
        if self.layout.pipeline > 1:
            source = dist.get_global_rank(self.pipeline, self.layout.pipeline - 1)
            dist.broadcast(tensor, source, group=self.pipeline)


def join_groups(ranks: TrainerGroup, layout: Layout, seed: int) -> Groups:
    """The groups of this generation, made at its first call; all ranks call it."""
    global _made_for
    run_without_gpu()
    if _made_for != (ranks, layout):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.experts,
            distributed_timeout_minutes=int(COLLECTIVE_LIMIT.total_seconds() // 60),
            create_gloo_process_groups=False,
        )
        _made_for = ranks, layout
    before = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.set_rng_state(before)  # Without a GPU Megatron draws from the generator of everybody else.
    return Groups(
        layout,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        sum=parallel_state.get_data_parallel_group(with_context_parallel=True),
        embedding=parallel_state.get_embedding_group(check_initialized=False),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_sum=parallel_state.get_expert_data_parallel_group(),
    )


def run_without_gpu() -> None:
    """Patches torch.cuda and Megatron's random numbers, once in a process; does nothing where there is a GPU.

    megatron-core 0.16 asks CUDA for its device and its random numbers. Each patch says who calls what it replaces.
    """
    global _applied
    if _applied or torch.cuda.is_available():
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    # tensor_parallel.mappings, .layers, p2p_communication and the rotary embedding allocate on "the current device".
    cuda.current_device = lambda: torch.device("cpu")
    # p2p_communication waits for the device after a batch of messages; on the CPU they have come by then.
    cuda.synchronize = lambda device=None: None
    # The tracker of random states forks what dropout and recomputation draw from: the CPU's generator here.
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = _seed
    random._get_cuda_rng_state = _state
    random._set_cuda_rng_state = _set_state
    # A schedule counts tokens on "cuda".
    schedules.torch = _OnCpu()
    _applied = True


class _OnCpu:
    """torch, to which "cuda" is the CPU where zeros are made."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: object = None, **options: Any) -> Tensor:
        """On the CPU."""
        return torch.zeros(*size, **options)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)
