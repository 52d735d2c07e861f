"""Who is next for devices that several runs share, and when a run that has them gives way. Knows no event.

Runs that share are granted the same devices and hold a lease only while a stage works. A run that wants some waits in
one line, and no later run passes it: each wait ends after at most one turn of every other run. Times are seconds on a
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

TURN_S = 30.0
"""A stage keeps devices that another run waits for so long; then it gives way, once it has made something."""
PATIENCE_S = 10 * TURN_S
"""Who has waited so long comes first, whatever its priority."""


class Waiter(msgspec.Struct, frozen=True):
    """A run's wish for devices, since it was first said."""

    number: int
    """Rises with every wish: among equals the lower one is next."""
    run: str
    devices: frozenset[str]
    since: float
    priority: int = 0


def next_for(line: Iterable[Waiter], devices: Iterable[str], run: str, now: float) -> Waiter | None:
    """Of those that wait for any of `devices`, another run's that is next."""
    wanted = frozenset(devices)
    others = [waiter for waiter in line if waiter.run != run and waiter.devices & wanted]
    return min(others, key=lambda waiter: _place(waiter, now), default=None)


def ahead_of(line: Iterable[Waiter], waiter: Waiter, now: float) -> Waiter | None:
    """Another run's wish for any of a waiter's devices that comes before it."""
    first = next_for(line, waiter.devices, waiter.run, now)
    return first if first is not None and _place(first, now) < _place(waiter, now) else None


def gives_way(waiter: Waiter, priority: int, held_s: float, *, made: bool, idle: bool) -> bool:
    """Whether a run of `priority` that has held devices for `held_s` gives way to a waiter inside its stage.

    At once where its stage leaves them `idle`. Else after its turn, which is over at once for a waiter of a higher
    priority, and only where it has `made` something since it took them: so each turn brings its run forward.
    """
    over = waiter.priority > priority or held_s >= TURN_S
    return idle or (made and over)


def _place(waiter: Waiter, now: float) -> tuple[bool, int, int]:
    return now - waiter.since < PATIENCE_S, -waiter.priority, waiter.number
