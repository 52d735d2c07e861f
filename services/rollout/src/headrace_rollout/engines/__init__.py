"""Engines by name. An engine's packages are imported only when a run asks for it."""

from __future__ import annotations

from importlib.util import find_spec

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
        "sglang": "headrace_rollout.engines.plugins:SGLANG",
    },
)

_MODULES = {"vllm": "vllm", "sglang": "sglang"}
"""What must be importable for an engine that is an extra of this package."""


def installed_engines() -> list[str]:
    """Names of the engines that this instance can build; imports none of them."""
    return [name for name in ENGINES.names() if name not in _MODULES or find_spec(_MODULES[name]) is not None]
