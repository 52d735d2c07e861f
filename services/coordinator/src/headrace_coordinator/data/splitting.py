"""Which items differ, which part of a source each is of, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from headrace_schema.problems import Impossible, problem
from headrace_schema.sections.generating import DataSection

from headrace_coordinator.data.packed import WORDS, PackedItems, hash_of, in_order


def distinct_items(items: PackedItems, shown: Sequence[str]) -> tuple[np.ndarray, dict[int, str], int]:
    """Numbers of items that differ, ids of some, and how many the source answers in more than one way.

    The first answer counts. Where the question alone does not tell items apart, the id of each is all that the prompt
    shows of it.
    """
    hashes = items.key_hashes
    order = in_order(hashes)
    again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    if not len(again):
        return np.arange(len(items)), {}, 0
    alike: dict[int, list[int]] = {}
    first = -1
    for place in again.tolist():
        if place - 1 != first or not alike:
            start = int(order[place - 1])
        first = place
        alike.setdefault(start, []).append(int(order[place]))
    kept = np.ones(len(items), np.bool_)
    ids: dict[int, str] = {}
    contradicting: set[str] = set()
    for one, others in alike.items():
        known = items[one]
        same = {known.told_apart(shown): (one, known.answer)}
        for number in others:
            item = items[number]
            number_known, answer = same.setdefault(told := item.told_apart(shown), (number, item.answer))
            kept[number] = number_known == number
            if answer != item.answer:
                contradicting.add(told)
        if len(same) > 1:
            ids |= {number: told for told, (number, _) in same.items()}
    return np.flatnonzero(kept), ids, len(contradicting)


def check_enough(section: DataSection, kept: int, excluded: int) -> None:
    if kept == 0:
        reason = f"the source {section.source} has no item" + (
            f" left after {excluded} excluded" if excluded else ""
        )
        raise Impossible(
            [problem("data.exclude" if excluded else "data.source", reason, "give it items to train on")]
        )
    if section.heldout >= kept:
        reason = f"{section.heldout} held-out items leave none to train on: {kept} distinct items remain" + (
            f" after {excluded} excluded" if excluded else ""
        )
        raise Impossible([problem("data.heldout", reason, f"the nearest valid value is {kept - 1}")])


def wholes_in_order(purpose: str, wholes: np.ndarray) -> np.ndarray:
    """The wholes that items are of, each once, in an order that the purpose alone decides."""
    found = np.unique(wholes)
    hashes = b"".join(hash_of(f"{purpose}\0whole {number}".encode()) for number in found.tolist())
    ranked: np.ndarray = found[in_order(np.frombuffer(hashes, WORDS))]
    return ranked


def parts_of(train: np.ndarray, part_of: np.ndarray, weights: Sequence[int]) -> list[np.ndarray]:
    """Numbers of training items by source, where the sources have weights; else one part with all."""
    if not weights:
        return [train]
    parts = [train[part_of[train] == part] for part in range(len(weights))]
    if empty := [part for part, numbers in enumerate(parts) if not len(numbers)]:
        key = f"data.options.parts[{empty[0]}]"
        reason = (
            "no item of it is left to train on (held out, excluded, or the same as one of a part before it)"
        )
        raise Impossible([problem(key, reason, "give it more items, or leave it out")])
    return parts


@lru_cache(maxsize=64)
def turns_of(seed: int, number: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """The part of each ordinal of a block."""
    parts = [part for part, weight in enumerate(weights) for _ in range(weight)]
    places = sorted(range(len(parts)), key=lambda place: hash_of(f"block {seed} {number} {place}".encode()))
    return tuple(parts[place] for place in places)
