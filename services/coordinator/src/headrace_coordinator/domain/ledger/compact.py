"""Lists of slots as runs, so that a step of 10⁵ slots fits into every message and a page of certificates is small.

A run is (prompt, sample, attempt, samples, groups): `samples` successive samples of each of `groups` successive
prompts, whose attempts rise by one from slot to slot. A run of one slot is (prompt, sample, attempt).
"""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, ...]
Slot = tuple[int, int, int]
Drop = tuple[int, int, str]
Drops = dict[str, list[Run]]
"""Runs of dropped slots by reason; their attempts mean nothing."""


def compact(slots: Iterable[Slot]) -> list[Run]:
    """Runs of (prompt, sample, attempt), in the order of `slots`."""
    rows: list[list[int]] = []
    for prompt, sample, attempt in slots:
        last = rows[-1] if rows else None
        if last and (last[0], last[1] + last[3], last[2] + last[3]) == (prompt, sample, attempt):
            last[3] += 1
        else:
            rows.append([prompt, sample, attempt, 1, 1])
    runs: list[list[int]] = []
    for row in rows:
        last = runs[-1] if runs else None
        if last and row == [last[0] + last[4], last[1], last[2] + last[3] * last[4], last[3], 1]:
            last[4] += 1
        else:
            runs.append(row)
    return [tuple(run[:3] if run[3:] == [1, 1] else run) for run in runs]


def expand(runs: Iterable[Run]) -> list[Slot]:
    """(prompt, sample, attempt) of each slot, in the order that was compacted."""
    slots: list[Slot] = []
    for prompt, sample, attempt, *shape in runs:
        samples, groups = shape or (1, 1)
        for group in range(groups):
            whose, first = prompt + group, attempt + group * samples
            slots += [(whose, sample + index, first + index) for index in range(samples)]
    return slots


def count(runs: Iterable[Run]) -> int:
    """How many slots the runs hold."""
    return sum(run[3] * run[4] if len(run) > 3 else 1 for run in runs)


def compact_drops(drops: Iterable[Drop]) -> Drops:
    """Runs of dropped slots by reason."""
    by_reason: dict[str, list[Slot]] = {}
    for prompt, sample, reason in drops:
        slots = by_reason.setdefault(reason, [])
        slots.append((prompt, sample, len(slots)))
    return {reason: compact(slots) for reason, slots in by_reason.items()}


def expand_drops(drops: Drops) -> list[Drop]:
    """(prompt, sample, reason) of each dropped slot, by slot."""
    return sorted(
        (prompt, sample, reason) for reason, runs in drops.items() for prompt, sample, _ in expand(runs)
    )


def count_drops(drops: Drops) -> int:
    """How many slots were dropped."""
    return sum(count(runs) for runs in drops.values())
