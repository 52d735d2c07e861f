"""Scorers of benchmarks whose groups differ. The reward service loads this file, so it imports no neighbour."""

from __future__ import annotations

MIXED, ALIKE = "mixed", "alike"
"""What the `answer` of a prompt of `_tail_model.py` says of the rewards of its group."""


def uneven(prompt: str, completion: str, reference: str, metadata: dict[str, object]) -> float:
    """Another reward for nearly every answer, between 0 and 1, so that every group has something to learn."""
    return sum(ord(character) * place for place, character in enumerate(completion, 1)) % 997 / 997


def by_length(prompt: str, completion: str, reference: str, metadata: dict[str, object]) -> float:
    """Another reward for each length, or 0 for all: a group of equal rewards leaves nothing to learn."""
    return -len(completion) / 1000 if reference == MIXED else 0.0
