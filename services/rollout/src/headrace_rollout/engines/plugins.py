"""The built-in engines with their options. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin

from headrace_rollout.engines.transformers.options import TransformersOptions
from headrace_rollout.engines.vllm.options import VllmOptions

_DISTRIBUTIONS = ("top_p_after_others", "penalty_counts_prompt")
TRANSFORMERS = Plugin(
    "headrace_rollout.engines.transformers.engine:build",
    TransformersOptions,
    description="continuous batching over transformers' models",
    features=(
        "position_keyed_sampling",
        "deterministic",
        "resume_from_prefix",
        "resume_from_cache",
        "inflight_update",
        "score_processed",
        "suspend_frees_memory",
        "routed_experts",
        "lora",
        "images",
        "learned_drafts",
        "likeliest",
        *_DISTRIBUTIONS,
    ),
)
VLLM = Plugin(
    "headrace_rollout.engines.vllm.building:build_vllm",
    options=VllmOptions,
    description="vLLM in processes of its own (extra headrace-rollout[vllm])",
    packages=("vllm",),
    modules=("vllm",),
    features=(
        "resume_from_prefix",
        "inflight_update",
        "tensor_parallel",
        "routed_experts",
        "lora",
        "images",
        "likeliest",
        "drafts_truncated",
        *_DISTRIBUTIONS,
    ),
)
