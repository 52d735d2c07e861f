"""Options of rollout.engine: transformers. Knows no torch."""

from __future__ import annotations

from headrace_servicekit.registry import Options
from pydantic import Field, NonNegativeInt, PositiveInt


class TransformersOptions(Options):
    """Options of the built-in engine."""

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
