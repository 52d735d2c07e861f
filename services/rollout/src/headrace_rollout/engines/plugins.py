"""The built-in engines with their options. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, NonNegativeInt, PositiveInt

from headrace_rollout.engines.vllm.options import VllmOptions


class TransformersOptions(Options):
    """Options of rollout.engine: transformers."""

    kv_cache_bytes: PositiveInt | None = Field(
        default=None,
        description="most memory of the running samples' keys and values; conversations between two turns keep theirs "
        "in up to a quarter of it more; default: a quarter of what the host has free, or four fifths of what a GPU has",
    )
    speculative_tokens: NonNegativeInt | None = Field(
        default=None,
        le=15,
        description="most tokens that a row drafts, while at most eight run: with trainer.draft by the head that "
        "learns beside the policy, else from what the row has said before; answers stay as they are, and come sooner "
        "where drafts are right. Beside stop strings, a penalty, routed experts or images, nothing is drafted; 0: "
        "never; "
        "default: 3 with trainer.draft, else 0",
    )


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
