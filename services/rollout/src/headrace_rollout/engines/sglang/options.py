"""Options of rollout.engine: sglang. Knows no SGLang: instances without it validate them all the same."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from headrace_rollout.engines.hosted.options import HostedOptions

OWN_ARGUMENTS = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "context_length": "model.max_context",
    "max_running_requests": "rollout.max_concurrency",
    "tp_size": "rollout.engine_options.tensor_parallel_size",
    "mem_fraction_static": "rollout.engine_options.memory_fraction",
    "max_total_tokens": "rollout.engine_options.kv_cache_tokens",
    "disable_cuda_graph": "rollout.engine_options.enforce_eager",
}
"""Arguments that other settings of the run decide."""
FIXED_ARGUMENTS = frozenset(
    {
        "custom_weight_loader",
        "device",
        "dp_size",
        "enable_memory_saver",
        "incremental_streaming_output",
        "load_format",
        "nnodes",
        "node_rank",
        "pp_size",
        "sampling_defaults",
        "sampling_mask_max_tokens",
        "skip_tokenizer_init",
        "sleep_on_idle",
        "weight_version",
    }
)
"""Arguments that the install protocol and the log-probs rely on."""


class SglangOptions(HostedOptions):
    """What a run may say about SGLang."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.8, description="share of a GPU's memory for weights and KV cache"
    )
    kv_cache_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens that the KV cache holds; default: what is left of the share, on a CPU 8192",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further fields of SGLang's ServerArgs, by name"
    )
