"""Options that every hosted engine has. Knows no engine: instances without it validate them all the same."""

from __future__ import annotations

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat, PositiveInt


class HostedOptions(Options):
    """What a run may say about an engine in processes of its own."""

    tensor_parallel_size: PositiveInt | None = Field(
        default=None, description="devices that one model spans; default: all of the lease's GPUs"
    )
    enforce_eager: bool = Field(default=False, description="no CUDA graphs: slower, and starts sooner")
    start_timeout_s: PositiveFloat = Field(default=600.0, description="longest start of the engine's process")
    install_timeout_s: PositiveFloat = Field(default=300.0, description="longest install of a version")
    silence_timeout_s: PositiveFloat = Field(
        default=120.0, description="seconds without a token, after which the engine counts as hung"
    )
