"""Engines by name. An engine's packages are imported only when a run asks for it."""

from __future__ import annotations

from headrace_servicekit.registry import Registry

from headrace_rollout.engines.base import Engine

ENGINES: Registry[Engine] = Registry(
    "headrace.rollout.engines",
    "engine",
    "rollout.engine",
    "rollout.engine_options",
    {
        "transformers": "headrace_rollout.engines.plugins:TRANSFORMERS",
        "vllm": "headrace_rollout.engines.plugins:VLLM",
    },
)
