"""Users who evaluate: they submit evaluations of suites beside the runs, interfere, and kill what answers them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain import run_states
from headrace_schema.evaluating import EvaluationSpec

from headrace_simulation.specs import random_evaluation

if TYPE_CHECKING:
    from headrace_simulation.users import Users
    from headrace_simulation.world import World

PATIENCE = 6
"""Tries to evaluate a checkpoint: its run may have none, or be deleted."""
STRIKES = 5
"""Most faults and changes of intent of one evaluation, beside the world's other faults."""
KINDS = [
    *["rollout"] * 3,
    *["reward"] * 2,
    "coordinator",
    run_states.PAUSE,
    run_states.PAUSE_NOW,
    run_states.CANCEL,
]


class Evaluators:
    """Submits `count` evaluations, with random numbers of its own: what else happens in a seed does not change."""

    def __init__(self, world: World, users: Users, rng: random.Random, count: int) -> None:
        self.specs: dict[str, EvaluationSpec] = {}
        """The spec of each evaluation."""
        self._world = world
        self._users = users
        self._rng = rng
        self._count = count

    async def live(self) -> None:
        """Submits every evaluation and interferes with each as often as the seed says."""
        await asyncio.gather(*(self._come(index) for index in range(self._count)))

    async def _come(self, index: int) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 60.0))
        names = list(self._users.specs)
        origin = self._rng.choice([*names, ""]) if names else ""
        run = await self._submit(origin, f"evaluate-{index}") if origin else ""
        run = run or await self._submit("", f"evaluate-{index}-model")
        self._users.counts["evaluation of a checkpoint" if self.specs[run].checkpoint else "evaluation"] += 1
        for _ in range(self._rng.randint(0, STRIKES) if self._world.faulty else 0):
            await asyncio.sleep(self._rng.expovariate(1 / 1.5))
            await self._strike(run, self._rng.choice(KINDS))

    async def _submit(self, origin: str, key: str) -> str:
        """The evaluation's id; empty when there is nothing to evaluate."""
        asked = random_evaluation(self._rng, self._world.specs[0].seed, origin)

        def request(coordinator: Coordinator) -> Awaitable[Any]:
            return coordinator.submissions.submit(asked, key)

        copies = self._rng.choice([1, 1, 3])
        for _ in range(PATIENCE if origin else 1000):
            answers = await asyncio.gather(*(self._users.ask(request) for _ in range(copies)))
            made = {answer for answer in answers if answer is not None}
            if made:
                run = self._users.one_of(key, made)
                self.specs[run] = asked
                return run
            await asyncio.sleep(5.0)
        return ""

    async def _strike(self, run: str, kind: str) -> None:
        world = self._world
        match kind:
            case run_states.PAUSE | run_states.PAUSE_NOW | run_states.CANCEL:
                if kind != run_states.CANCEL or self._rng.random() < 0.3:
                    await self._users.intend(run, kind, self._rng.choice([1, 2]))
            case "coordinator":
                await world.kill_coordinator(self._rng.uniform(0.1, 3.0))
            case _:
                if living := world.living(kind):
                    await world.kill(self._rng.choice(living).incarnation)
