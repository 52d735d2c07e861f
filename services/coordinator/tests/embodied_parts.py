"""Simulated embodied runs, whose simulators may be lost, come and go."""

import asyncio
import random

from headrace_schema.spec import RunSpec
from headrace_simulation.world import World


def embodied(seed: int, rollouts: int = 2, steps: int = 6) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "robots",
            "workflow": "embodied",
            "seed": seed,
            "steps": steps,
            "model": {"policy": {"kind": "mlp"}},
            "environment": {"tasks": ["reach", "push"], "count": 8},
            "data": {"heldout": 4, "options": {"starts": 40}},
            "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 8},
            "rollout": {"instances": rollouts},
            "evaluation": {"every": 2},
        }
    )


def agentic(seed: int, rollouts: int = 2, steps: int = 6) -> RunSpec:
    """A run of conversations, with two kinds of environments."""
    return RunSpec.model_validate(
        {
            "name": "talks",
            "workflow": "agentic",
            "seed": seed,
            "steps": steps,
            "model": {"path": "model"},
            "environment": {"tasks": ["games.py:Guess", "tools"], "count": 8},
            "data": {"heldout": 4, "options": {"starts": 40}},
            "algorithm": {"group_size": 4, "prompts_per_step": 4},
            "rollout": {"instances": rollouts},
            "evaluation": {"every": 2},
        }
    )


class Robots(World):
    """A fleet with two simulators; what happens to them is up to the test."""

    def __init__(self, seed: int, strikes: int = 0, rollouts: int = 2) -> None:
        super().__init__(seed, faults=False)
        self.spec = embodied(seed, rollouts)
        self.strikes = strikes
        self.calls: list[str] = []
        self.requests: list[object] = []

    def heard(self, method: str, request: object) -> None:
        super().heard(method, request)
        self.calls.append(method)
        self.requests.append(request)

    async def trouble(self) -> None:
        """Kills a simulator as often as asked, each time while a stream of episodes is open."""
        rng = random.Random(f"{self.seed}/robots")
        for _ in range(self.strikes):
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            while not any(i.running for i in self.living("rollout")):  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await self.kill(rng.choice(self.living("simulator")).incarnation)

    def events(self, kind: type) -> list:
        return [event for event in self.store.log if isinstance(event, kind)]


class Talks(Robots):
    """The same fleet with a run of conversations."""

    def __init__(self, seed: int, strikes: int = 0) -> None:
        super().__init__(seed, strikes)
        self.spec = agentic(seed)


class Scaled(Robots):
    """In the middle of the run a third simulator comes, and then the first two are told to stop."""

    async def trouble(self) -> None:
        old = self.living("simulator")
        while not any(i.running for i in self.living("rollout")):  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self.bear("simulator", "simulator-9", self.hosts[0])
        new = self.newcomer
        while not new.pools:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.gather(*(self.terminate(each, 10.0) for each in old))

    @property
    def newcomer(self):
        return next(i for i in self.instances.values() if i.name == "simulator-9")
