"""A small world without faults in which a test plays its part."""

import asyncio

from headrace_coordinator.domain import events as ev
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World

ENOUGH_S = 600.0


class Scene(World):
    """One rollout, one trainer; `play` does what the test is about, beside `count` runs that come at once."""

    def __init__(self, play, count=1, seed=5, steps=6, **sections):
        super().__init__(seed, faults=False, count=count)
        self.play = play
        self.specs = [self.plain(spec, steps, sections) for spec in self.specs]

    def plain(self, spec, steps, sections):
        """A spec that one instance of each kind can run."""
        fields = spec.model_dump(mode="json")
        plain = {
            "rollout": {"instances": 1},
            "trainer": {"ranks": 1, "helpers": 0},
            "algorithm": {"prompts_per_step": 2},
            "placement": {"mode": "collocated"},
            "evaluation": {"every": 0},
            "checkpoint": {"enabled": True, "interval_steps": 100},
            "scheduling": {"priority": 0, "weight": 1.0, "quantum_s": 5.0},
            "limits": {"recoveries": 50},
        }
        for name, section in (*plain.items(), *sections.items()):
            fields[name] |= section
        return type(spec).model_validate(fields | {"steps": steps, "deterministic": False})

    async def trouble(self):
        await self.play(self)

    def log(self, kind):
        return [event for event in self.store.log if isinstance(event, kind)]

    async def until(self, predicate):
        for _ in range(int(ENOUGH_S / 0.05)):
            if predicate():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"it did not come to that: {self._stuck()}")

    async def first(self):
        """The id of the first run, once it has committed a step."""
        await self.until(lambda: self.log(ev.StepCommitted))
        return self.log(ev.StepCommitted)[0].run

    def state(self, run):
        """Of a run; "" while there is no coordinator."""
        if self.coordinator is None:
            return ""
        state = self.coordinator.event_log.state
        return state.runs[run].state if run in state.runs else state.ended[run].state

    async def another(self, key="another"):
        return await self.users.submit(self.specs[0], key)


def scored_items(monkeypatch):
    """A list of what reward instances are asked to score from now on."""
    score, seen = Reward.Score, []

    async def watched(self, requests):
        async def each():
            async for request in requests:
                seen.extend(request.items)
                yield request

        async for response in score(self, each()):
            yield response

    monkeypatch.setattr(Reward, "Score", watched)
    return seen


def ends(scene):
    return run_virtual(scene.live()).states


def trained_once(scene, run):
    steps = [event.certificate.ordinal for event in scene.log(ev.StepCommitted) if event.run == run]
    return steps == list(range(1, len(steps) + 1))
