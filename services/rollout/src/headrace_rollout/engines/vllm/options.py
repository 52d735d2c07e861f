"""Options of rollout.engine: vllm. Knows no vLLM: instances without it validate them all the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from headrace_rollout.engines.hosted.options import HostedOptions, refused_parallelism

OWN_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "max_model_len": "model.max_context",
    "max_num_seqs": "rollout.max_concurrency",
    "tensor_parallel_size": "rollout.engine_options.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.engine_options.pipeline_parallel_size",
    "data_parallel_size": "rollout.instances",
    "quantization": "rollout.engine_options.quantization",
    "quantization_config": "rollout.engine_options.quantization",
    "speculative_config": "rollout.engine_options.speculative",
    "spec_method": "rollout.engine_options.speculative",
    "spec_model": "rollout.engine_options.speculative",
    "spec_tokens": "rollout.engine_options.speculative",
    "gpu_memory_utilization": "rollout.engine_options.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.engine_options.kv_cache_gib",
    "enforce_eager": "rollout.engine_options.enforce_eager",
    "enable_lora": "rollout.enable_lora",
    "max_loras": "policies",
    "max_cpu_loras": "policies",
    "max_lora_rank": "trainer.lora.rank",
}
"""Arguments that other settings of the run decide."""
FIXED_ARGUMENTS = frozenset(
    {
        "load_format",
        "logprobs_mode",
        "worker_extension_cls",
        "weight_transfer_config",
        "enable_sleep_mode",
        "skip_tokenizer_init",
        "limit_mm_per_prompt",
        "generation_config",
        "sleep_preserve_parameter_names",
    }
)
"""Arguments that the install protocol and the log-probs rely on."""
REFUSED_ARGUMENTS = refused_parallelism(
    several_hosts=("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
    inside=(
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "data_parallel_start_rank",
    ),
)
Quantization = Literal["fp8", "fp8_block", "int8"]
SCHEMES: dict[Quantization, str] = {
    "fp8": "fp8_per_channel",
    "fp8_block": "fp8_per_block",
    "int8": "int8_per_channel_weight_only",
}
"""vLLM's names of its schemes that quantise at each install."""


class VllmOptions(HostedOptions):
    """What a run may say about vLLM."""

    pipeline_parallel_size: PositiveInt = Field(
        default=1,
        description="devices (groups of tensor_parallel_size) that the layers are divided into, one part behind the "
        "other",
    )
    hosts: PositiveInt = Field(
        default=1,
        description="hosts that one engine spans, each with an equal part of its devices: so many of rollout.instances "
        "make it",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="what weights of linear layers are quantised to at each install: fp8 (one scale a channel), "
        "fp8_block (one for 128 × 128 numbers), int8 (experts alone); default: none, they are the trainer's",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.85, description="share of a GPU's memory that vLLM may take"
    )
    kv_cache_gib: PositiveFloat | None = Field(
        default=None, description="KV cache of each device; default: what is left of the share, on a CPU 1"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further fields of vLLM's AsyncEngineArgs, by name"
    )
