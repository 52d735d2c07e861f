"""Users who change the size of trainer groups of runs at work, at any moment."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from headrace_coordinator.domain import run_states
from headrace_schema.changing import RunChange

if TYPE_CHECKING:
    from headrace_simulation.users import Users
    from headrace_simulation.world import World

SIZES = (1, 1, 2, 2, 3)
CARE_S = 20.0


def regroups(seed: int) -> bool:
    """Whether a seed has such users: some of the seeds that found no bug without them."""
    return seed % 8 in (1, 3) or seed % 16 == 13


class Regroupers:
    """Has random numbers of its own, so that what else happens in a seed does not change."""

    def __init__(self, world: World, users: Users, rng: random.Random) -> None:
        self._world = world
        self._users = users
        self._rng = rng
        self._asked = 0

    async def live(self) -> None:
        """Changes sizes until everything has ended; a queued run without trainers gets its spec's size again."""
        for _ in range(self._rng.randint(2, 8)):
            await asyncio.sleep(self._rng.expovariate(1 / 5.0))
            if names := list(self._users.specs):
                run, ranks = self._rng.choice(names), self._rng.choice(SIZES)
                await asyncio.gather(*(self._ask(run, ranks) for _ in range(self._rng.choice([1, 1, 2]))))
        while True:
            await asyncio.sleep(CARE_S)
            for state in self._world.states():
                least = self._users.specs.get(state.id)
                if state.state == run_states.QUEUED and least and state.ranks > least.trainer.ranks:
                    await self._ask(state.id, least.trainer.ranks)

    async def _ask(self, run: str, ranks: int) -> None:
        self._asked += 1
        key, change = f"ranks-{self._asked}", RunChange.model_validate({"trainer": {"ranks": ranks}})
        made = await self._users.ask(lambda coordinator: coordinator.run_changes.change(run, change, key))
        self._users.counts["ranks"] += made is not None
