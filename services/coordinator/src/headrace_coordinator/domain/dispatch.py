"""Which rollout makes which sample: order fixed before dispatch, work pulled, a lost instance's work re-issued."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

GroupWork = tuple[int, list[int]]
"""A prompt ordinal with the sample indices to make."""


class Dispatcher:
    """Work of one step. Holders are incarnation ids."""

    def __init__(self, groups: Iterable[GroupWork], expected: Callable[[int], float] | None = None) -> None:
        """`expected` gives a prompt's expected tokens; the longest start first. Without it: in order."""
        ordered = sorted(groups)
        if expected is not None:
            ordered.sort(key=lambda group: -expected(group[0]))
        self._queue: list[GroupWork] = ordered
        self._in_flight: dict[str, set[tuple[int, int]]] = {}

    @property
    def waiting(self) -> bool:
        """There is work that nobody has."""
        return bool(self._queue)

    def take(self, holder: str, capacity: int, holders: int) -> list[GroupWork]:
        """Groups for `holder` to start now: its even share of what is left, at most `capacity` at once."""
        flying = self._in_flight.setdefault(holder, set())
        everything = sum(len(samples) for _, samples in self._queue)
        everything += sum(len(other) for other in self._in_flight.values())
        room = min(capacity, ceil(everything / max(holders, 1))) - len(flying)
        taken: list[GroupWork] = []
        while self._queue and (len(self._queue[0][1]) <= room or (not flying and not taken)):
            prompt, samples = self._queue.pop(0)
            taken.append((prompt, samples))
            room -= len(samples)
        for prompt, samples in taken:
            flying.update((prompt, sample) for sample in samples)
        return taken

    def done(self, holder: str, prompt: int, sample: int) -> None:
        """A sample needs no more work from its holder."""
        self._in_flight.get(holder, set()).discard((prompt, sample))

    def lost(self, holder: str) -> list[tuple[int, int]]:
        """The holder is gone: what it had goes to the front, in order."""
        flying = sorted(self._in_flight.pop(holder, set()))
        self.put_back(flying)
        return flying

    def put_back(self, slots: Iterable[tuple[int, int]]) -> None:
        """Slots to make again, ahead of everything else."""
        groups: dict[int, list[int]] = {}
        for prompt, sample in sorted(slots):
            groups.setdefault(prompt, []).append(sample)
        self._queue[:0] = list(groups.items())

    def forget(self, prompt: int) -> None:
        """A dropped group needs no more work."""
        self._queue = [group for group in self._queue if group[0] != prompt]
        for flying in self._in_flight.values():
            flying -= {slot for slot in flying if slot[0] == prompt}
