"""Follows what runs want: sets the number of instances of a kind, within bounds. Off unless bounds are given.

What is wanted is `domain.devices.demand`; who starts processes, containers or pods is a supervisor.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain.devices.demand import instances_wanted
from headrace_coordinator.store.event_log import EventLog

LOOK_S = 5.0
SETTLE_S = 60.0
"""Between two changes of a kind, or the cool-down if that is shorter: a new instance shows in figures after a step."""
KINDS = ("rollout", "trainer", "reward", "simulator")
Scale = Callable[[str, int], Awaitable[None]]
"""Asks for a number of instances of a kind. Raises Refused."""


@dataclass(frozen=True)
class Bounds:
    """The least and the most instances of a kind."""

    least: int
    most: int


class Scaling(msgspec.Struct):
    """What the autoscaler has done with one kind."""

    asked: int | None = None
    changed_at: float = float("-inf")
    lower_since: float | None = None
    problem: str = ""


def parse_bounds(text: str) -> dict[str, Bounds]:
    """Bounds by kind from "rollout=1:8,reward=1:4". Raises ValueError naming the item."""
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(rf"({'|'.join(KINDS)})=(\d{{1,4}}):(\d{{1,4}})", item)
        if match is None or int(match[2]) > int(match[3]):
            raise ValueError(
                f"{item[:80]!r}; write KIND=LEAST:MOST of {', '.join(KINDS)}, separated by commas"
            )
        found[match[1]] = Bounds(int(match[2]), int(match[3]))
    return found


class Autoscaler:
    """Grows a kind at once, and shrinks it when fewer were wanted for the whole cool-down."""

    def __init__(
        self, event_log: EventLog, scale: Scale, bounds: dict[str, Bounds], cooldown_s: float
    ) -> None:
        self.bounds = bounds
        self.scalings = {kind: Scaling() for kind in bounds}
        self._event_log = event_log
        self._scale = scale
        self._cooldown_s = cooldown_s

    async def run(self) -> None:
        """Looks every LOOK_S, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Changes the kinds that are due."""
        wanted = instances_wanted(self._event_log.state)
        for kind, bounds in self.bounds.items():
            await self._follow(kind, min(max(wanted[kind], bounds.least), bounds.most))

    async def _follow(self, kind: str, wanted: int) -> None:
        done, now = self.scalings[kind], self._event_log.monotonic()
        settle_s = min(SETTLE_S, self._cooldown_s)
        there = self._there(kind) if done.asked is None else done.asked
        if wanted >= there:
            done.lower_since = None
        elif done.lower_since is None:
            done.lower_since = now
        shrinks = done.lower_since is not None and now - done.lower_since >= self._cooldown_s
        if wanted == there or not (wanted > there or shrinks) or now - done.changed_at < settle_s:
            return
        done.changed_at, done.lower_since = now, None
        try:
            await self._scale(kind, wanted)
            done.asked, done.problem = wanted, ""
        except Refused as refused:
            done.problem = refused.message

    def _there(self, kind: str) -> int:
        instances = self._event_log.state.instances.values()
        return sum(each.kind == kind and not each.draining for each in instances)
