"""One simulated run whose trainer group changes its size."""

from __future__ import annotations

import asyncio

from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev
from headrace_schema.changing import RunChange
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World

STEPS = 6


class Scene(World):
    """One run and two trainers. Its user wants `sizes` ranks, one after the other, each after two more steps."""

    def __init__(self, sizes=(2, 1), trainers=2, ranks=1, mode="collocated", steps_total=STEPS, **sections):
        super().__init__(11, faults=False)
        self.sizes, self.refusals = list(sizes), []
        self.hear = lambda method, request: None
        spec = self.spec.model_dump(mode="json")
        spec |= {"deterministic": False, "steps": steps_total, "export": False}
        fields = {
            "rollout": {"instances": 1},
            "trainer": {"ranks": ranks, "helpers": 0},
            "algorithm": {"prompts_per_step": 6, "group_size": 4, "options": {}},
            "placement": {"mode": mode, "measure_steps": 2},
            "checkpoint": {"enabled": False},
            "limits": {"recoveries": 50, "max_drop_rate": 1.0},
            "data": {"curriculum": None},
            "evaluation": {"every": 0},
            **sections,
        }
        for name, section in fields.items():
            spec[name] |= section
        self.spec = type(self.spec).model_validate(spec)
        self.counts = {"rollout": 1, "trainer": trainers, "reward": 1}

    def heard(self, method, request):
        self.hear(method, request)
        super().heard(method, request)

    async def trouble(self):
        for ranks in self.sizes:
            await self.steps(2)
            await self.want(ranks)

    async def steps(self, more):
        reached = len(self.log(ev.StepCommitted)) + more
        while len(self.log(ev.StepCommitted)) < reached:  # noqa: ASYNC110 - virtual time: a look costs nothing
            await asyncio.sleep(0.02)

    async def want(self, ranks, run=""):
        while True:
            coordinator, _ = await self.serving()
            key = f"want-{ranks}-{len(self.refusals)}"
            try:
                return await coordinator.run_changes.change(
                    run or next(iter(self.users.specs)), RunChange(trainer={"ranks": ranks}), key
                )
            except Refused as refused:
                self.refusals.append(refused)
                return None

    def log(self, kind):
        return [event for event in self.store.log if type(event) is kind]


def played(scene):
    outcome = run_virtual(scene.live())
    assert set(outcome.states.values()) == {"SUCCEEDED"}, outcome
    return outcome


LEADER, JOINER, COORDINATOR = "leader", "joiner", "coordinator"
