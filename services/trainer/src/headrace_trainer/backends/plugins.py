"""The built-in training backends with their options. Knows no torch."""

from __future__ import annotations

from typing import Literal

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveInt


class FsdpOptions(Options):
    """`trainer.backend_options` of fsdp. What is left out is chosen: the cheapest layout that fits."""

    shard: Literal["state", "gradients", "weights"] | None = Field(
        default=None,
        description="what is divided over the ranks: master weights and moments alone (state), also the sums of "
        "gradients, reduced after each micro-batch (gradients), or also the weights, gathered layer by layer in each "
        "forward and backward (weights); default: as little as fits",
    )
    shard_ranks: PositiveInt | None = Field(
        default=None,
        description="ranks that hold one copy of the model between them, a divisor of trainer.ranks: fewer than all "
        "gather among themselves alone, and reduce gradients over the copies (HSDP); default: the ranks of a host "
        "where that fits, else all",
    )
    offload: Literal["none", "optimizer", "parameters"] | None = Field(
        default=None,
        description="what lies in host memory: the optimizer's moments, moved to the GPU for the step (optimizer), or "
        "also master weights and gradients, with the step on the CPU (parameters); default: none where that fits",
    )
    offload_activations: bool = Field(
        default=False,
        description="inputs of layers, from which the backward pass computes these again, wait for it in host memory "
        "(pinned, of a GPU): for long sequences. Turns trainer.gradient_checkpointing on",
    )
    expert_parallel: PositiveInt = Field(
        default=1,
        description="ranks over which the experts of a layer are divided (mixtures of experts): tokens go to them; 1: "
        "experts are sharded and gathered like all weights, which is faster from some 6,000 tokens of a micro-batch on",
    )
    context_parallel: PositiveInt = Field(
        default=1,
        description="ranks over which the tokens of a row are divided, and attention's heads with them (Ulysses): for "
        "sequences whose activations do not fit on one rank. Must divide the attention heads",
    )
    fp8: bool = Field(
        default=False,
        description="matrix products of the policy's layers in fp8, a scale for each row (torchao); weights, gradients "
        "and what is kept for the backward pass stay bfloat16 and fp32. Needs an NVIDIA GPU of compute capability 9.0 "
        "or later, and is refused elsewhere. The head, experts, critic and reference model stay as they are",
    )
    compile: bool | None = Field(
        default=None,
        description="torch.compile of every layer, but for its attention: needs a C++ compiler (CPU) or Triton (GPU), "
        "and time at the first micro-batches; not with deterministic: true. Default: on NVIDIA and AMD GPUs with "
        "Triton, for text models; false computes layers as they are written",
    )


FSDP = Plugin(
    "headrace_trainer.backends.fsdp:build",
    FsdpOptions,
    "PyTorch's fully_shard over Gloo (CPU) or NCCL (GPU)",
    features=(
        *("adapters", "changing_ranks", "critic", "deterministic", "drafts", "helpers", "images", "policies"),
        "shared_prefix",
    ),
    check="headrace_trainer.backends.fsdp.checks:check_run",
)
