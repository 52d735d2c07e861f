"""The default engine: continuous batching in a loop over a Hugging Face model's forward pass."""

from __future__ import annotations

from headrace_servicekit.registry import Options

from headrace_rollout.engines.base import Engine, EngineConfig
from headrace_rollout.engines.transformers.engine import TransformersEngine


def build(options: Options, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights. Raises ModelNotReadable."""
    return TransformersEngine(config)
