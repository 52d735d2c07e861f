"""The built-in training backends with their options. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field


class FsdpOptions(Options):
    """`trainer.backend_options` of fsdp."""

    reshard_micro_batches: bool = Field(
        default=False,
        description="reduce and reshard after every micro-batch: less memory, more communication",
    )


FSDP = Plugin(
    "headrace_trainer.backends.fsdp:build", FsdpOptions, "PyTorch's fully_shard over Gloo (CPU) or NCCL (GPU)"
)
