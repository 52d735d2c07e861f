"""The scorer of `_tail_model.py`'s prompts. The reward service loads this file, so it imports no neighbour."""

from __future__ import annotations

MIXED, ALIKE = "mixed", "alike"
"""What a prompt's `answer` says of the rewards of its group."""


def score(prompt: str, completion: str, reference: str, metadata: dict[str, object]) -> float:
    """Another reward for each length, or 0 for all: a group of equal rewards leaves nothing to learn."""
    return -len(completion) / 1000 if reference == MIXED else 0.0
