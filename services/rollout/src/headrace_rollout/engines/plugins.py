"""The built-in engines with their options. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin

from headrace_rollout.engines.sglang.options import SglangOptions
from headrace_rollout.engines.vllm.options import VllmOptions

TRANSFORMERS = Plugin(
    "headrace_rollout.engines.transformers:build", description="continuous batching over transformers' models"
)
VLLM = Plugin(
    "headrace_rollout.engines.vllm.building:build",
    options=VllmOptions,
    description="vLLM in processes of its own (extra headrace-rollout[vllm])",
    packages=("vllm",),
)
SGLANG = Plugin(
    "headrace_rollout.engines.sglang.building:build",
    options=SglangOptions,
    description="SGLang in processes of its own (extra headrace-rollout[sglang])",
    packages=("sglang",),
)
