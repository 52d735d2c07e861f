"""The default engine: continuous batching in a loop over a Hugging Face model's forward pass."""

from __future__ import annotations

from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.plugins import TransformersOptions
from headrace_rollout.engines.transformers.engine import TransformersEngine


def build(options: TransformersOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights. Raises ModelNotReadable."""
    return TransformersEngine(config, options.kv_cache_bytes)
