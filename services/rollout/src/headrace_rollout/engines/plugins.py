"""The built-in engines with their options. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin

TRANSFORMERS = Plugin(
    "headrace_rollout.engines.transformers:build", description="continuous batching over transformers' models"
)
