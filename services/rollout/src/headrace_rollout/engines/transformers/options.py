"""Options of rollout.engine: transformers. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveInt


class TransformersOptions(Options):
    """Options of the built-in engine."""

    kv_cache_bytes: PositiveInt | None = Field(
        default=None,
        description="most memory of the running samples' keys and values; conversations between two turns keep theirs "
        "in up to a quarter of it more; default: a quarter of what the host has free, or four fifths of what a GPU has",
    )
