"""Which run is next for devices that several runs share, and when a run that holds them releases them. No events.

Runs that share are granted the same devices and hold a lease only while a stage works. Runs that want some wait in one
line, in which no later run is served first: each wait ends after at most one turn of every other run. Times are seconds
on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

TURN_S = 30.0
"""How long a stage keeps devices that another run waits for; then it releases them, once it has made something."""
PATIENCE_S = 10 * TURN_S
"""A run that has waited so long comes first, whatever its priority."""


class Waiter(msgspec.Struct, frozen=True):
    """A run that waits for devices, since when."""

    number: int
    """Rises with every waiter: among equals the lower one is next."""
    run: str
    devices: frozenset[str]
    since: float
    priority: int = 0


def next_for(line: Iterable[Waiter], devices: Iterable[str], run: str, now: float) -> Waiter | None:
    """The next waiter for any of `devices` that is of another run."""
    wanted = frozenset(devices)
    others = [waiter for waiter in line if waiter.run != run and waiter.devices & wanted]
    return min(others, key=lambda waiter: _place(waiter, now), default=None)


def ahead_of(line: Iterable[Waiter], waiter: Waiter, now: float) -> Waiter | None:
    """The waiter of another run for any of the same devices that comes first, if it comes before this one."""
    first = next_for(line, waiter.devices, waiter.run, now)
    return first if first is not None and _place(first, now) < _place(waiter, now) else None


def releases_to(waiter: Waiter, priority: int, held_s: float, *, made: bool, idle: bool) -> bool:
    """Whether a run of `priority` that has held devices for `held_s` releases them to a waiter inside its stage.

    At once where its stage leaves them `idle`. Else after its turn, which is over at once for a waiter of a higher
    priority, and only where it has `made` something since it took them: so that every turn makes progress.
    """
    over = waiter.priority > priority or held_s >= TURN_S
    return idle or (made and over)


def _place(waiter: Waiter, now: float) -> tuple[bool, int, int]:
    return now - waiter.since < PATIENCE_S, -waiter.priority, waiter.number
