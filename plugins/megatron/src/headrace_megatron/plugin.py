"""The megatron backend with its options. Knows no torch."""

from __future__ import annotations

from typing import Literal

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveInt


class MegatronOptions(Options):
    """`trainer.backend_options` of megatron. Ranks that are left over by these sizes are replicas (data parallel)."""

    tensor_parallel: PositiveInt = Field(
        default=1, description="ranks over which the matrices of a layer are divided"
    )
    pipeline_parallel: PositiveInt = Field(
        default=1, description="stages over which the layers are divided, one rank after another"
    )
    context_parallel: PositiveInt = Field(
        default=1, description="ranks over which the tokens of a sequence are divided"
    )
    expert_parallel: PositiveInt = Field(
        default=1,
        description="ranks over which the experts of a layer are divided; replicas and context-parallel ranks",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="divide what lies between the matrices over the tensor-parallel ranks too: less memory",
    )
    virtual_stages: PositiveInt = Field(
        default=1,
        description="chunks of layers of each stage, which follow each other round the stages: shorter waits, more "
        "messages",
    )
    pipeline_micro_batches: PositiveInt | None = Field(
        default=None,
        description="parts of a micro-batch that follow each other through the stages; default: four times the stages",
    )
    transformer_engine: Literal["auto", "off"] = Field(
        default="auto",
        description="matrices, norms and attention by Transformer Engine where it is installed beside a GPU; off: by "
        "Megatron's own layers and torch",
    )


MEGATRON = Plugin(
    "headrace_megatron.backend:build",
    MegatronOptions,
    "megatron-core: tensor, pipeline, context, expert and data parallel (extra headrace-trainer[megatron])",
    packages=("megatron-core",),
    modules=("megatron.core",),
    check="headrace_megatron.checks:check_run",
)
