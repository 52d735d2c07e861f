"""Options of rollout.engine: sglang. Knows no SGLang: instances without it validate them all the same."""

from __future__ import annotations

from typing import Annotated, Any, Self

from headrace_rollout.engines.base import Scope
from headrace_rollout.engines.hosted.options import HostedOptions, refused_parallelism
from headrace_servicekit.registry import Plugin
from pydantic import Field, PositiveInt, model_validator

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
    "dp_size": "rollout.instances",
    "enable_deterministic_inference": "rollout.engine_options.batch_invariant",
    "rl_on_policy_target": "rollout.engine_options.batch_invariant",
    "speculative_algorithm": "rollout.engine_options.speculative",
    "speculative_num_draft_tokens": "rollout.engine_options.speculative",
}
"""Arguments that other settings of the run decide."""
FIXED_ARGUMENTS = frozenset(
    {
        "custom_weight_loader",
        "device",
        "enable_memory_saver",
        "incremental_streaming_output",
        "load_format",
        "pp_size",
        "sampling_defaults",
        "sampling_mask_max_tokens",
        "skip_tokenizer_init",
        "sleep_on_idle",
        "weight_version",
    }
)
"""Arguments that the install protocol and the log-probs rely on."""


REFUSED_ARGUMENTS = {
    **refused_parallelism(
        several_hosts=("nnodes", "node_rank", "dist_init_addr"), inside=("enable_dp_attention",)
    ),
    "quantization": (
        "SGLang cannot put a new version into weights that it has quantised",
        "leave it out, or use rollout.engine: vllm, which can",
    ),
}
"""What is not offered, with reason and fix."""

WAKE_TAGS = {Scope.WEIGHTS: ["weights"], Scope.KV_CACHE: ["kv_cache", "cuda_graph"]}
"""SGLang's names of what comes back with a scope: graphs are replayed once there is a cache."""
RELEASED_GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
"""The variable with which captured graphs lie where they can be released, with a copy on the host."""


INVARIANT: dict[str, Any] = {"enable_deterministic_inference": True, "rl_on_policy_target": "fsdp"}
"""Kernels whose bits do not hang on the batch, and norms, positions and log-probs rounded as transformers has them."""


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

    @model_validator(mode="after")
    def _ngram(self) -> Self:
        if self.speculative is not None and self.speculative.method == "draft":
            raise ValueError(
                "speculative: SGLang loses a draft model when its memory is suspended; set method: ngram"
            )
        return self


SGLANG = Plugin(
    "headrace_sglang.building:build",
    options=SglangOptions,
    description="SGLang in processes of its own (extra headrace-rollout[sglang])",
    packages=("sglang",),
    modules=("sglang",),
    features=("resume_from_prefix", "inflight_update", "tensor_parallel"),
)
