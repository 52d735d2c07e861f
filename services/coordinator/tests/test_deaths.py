"""A run whose code ends a shared instance again and again has FAILED; its neighbour goes on and is not charged."""

import asyncio

import pytest
from embodied_parts import embodied
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.fleet.deaths import MOST_DEATHS, TURN_S
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.simulator import Simulator
from scene import Scene, ends, trained_once

LIMIT_S = 90.0
"""Within which a run that ends its instances is FAILED."""


class Neighbours(Scene):
    """Two runs at once at one reward instance; `evil` is the first, from when it has made a step."""

    def __init__(self, **fields):
        super().__init__(self.watch, count=2, **fields)
        self.spare |= {"rollout": 1, "trainer": 1}
        self.evil = ""
        self.deaths = 0

    async def watch(self, scene):
        await self.until(lambda: len({event.run for event in self.log(ev.StepCommitted)}) == 2)
        self.evil = self.log(ev.StepCommitted)[0].run
        self.users.doomed.add(self.evil)
        since = asyncio.get_running_loop().time()
        await self.until(lambda: self.state(self.evil) in run_states.TERMINAL)
        self.took_s = asyncio.get_running_loop().time() - since
        (other,) = {event.run for event in self.log(ev.StepCommitted)} - {self.evil}
        made = len(self.log(ev.StepCommitted))
        await self.until(lambda: len(self.log(ev.StepCommitted)) > made + 2)
        await self.users.intend(other, run_states.CANCEL)

    def is_evil(self, run):
        return bool(self.evil) and run.removeprefix("runs/") == self.evil

    def dies_of(self, run, instance):
        """Whether an instance ends now, since it runs the code of `run`."""
        evil = self.is_evil(run)
        if evil and instance.alive:
            self.deaths += 1
            self.spawn(self.kill(instance.incarnation))
        return evil


def check(scene, states, named):
    other = next(run for run in states if run != scene.evil)
    assert states == {scene.evil: "FAILED", other: "CANCELLED"}
    last = [event for event in scene.log(ev.RunStateChanged) if event.run == scene.evil][-1]
    assert named in last.reason and f"{MOST_DEATHS} " in last.reason, last.reason
    assert scene.took_s < LIMIT_S
    charged = [event for event in scene.log(ev.RunRecovering) if event.run == other]
    assert not charged, charged
    moves = [event.state for event in scene.log(ev.RunStateChanged) if event.run == other]
    assert moves == ["PLANNING", "RUNNING", "CANCELLING", "CANCELLED"] and trained_once(scene, other)
    assert {event.run for event in scene.log(ev.DeathCharged)} == {scene.evil}


def ends_as_it_scores(scene, monkeypatch, after_s=0.0):
    """States of the runs of a scene in which a reward instance ends `after_s` after each question of the evil run."""
    scores = Reward.Score

    async def score(self, requests):
        async def looked_at():
            async for request in requests:
                if after_s and scene.is_evil(request.header.run):
                    await asyncio.sleep(after_s)
                if scene.dies_of(request.header.run, self):
                    await asyncio.Event().wait()
                yield request

        async for response in scores(self, looked_at()):
            yield response

    monkeypatch.setattr(Reward, "Score", score)
    return ends(scene)


def test_a_scorer_that_ends_the_reward_service_is_charged_and_its_neighbour_is_not(monkeypatch):
    scene = Neighbours(steps=10_000)
    states = ends_as_it_scores(scene, monkeypatch)
    check(scene, states, scene.specs[0].reward.scorers[0].name)


def test_a_scorer_that_outlasts_its_turn_before_it_ends_the_service_is_charged_alone(monkeypatch):
    scene = Neighbours(steps=10_000)
    states = ends_as_it_scores(scene, monkeypatch, TURN_S + 5.0)
    assert states[scene.evil] == "FAILED"
    assert {event.run for event in scene.log(ev.DeathCharged)} == {scene.evil}


def test_a_restarted_coordinator_goes_on_counting(monkeypatch):
    async def watch(scene):
        task = asyncio.ensure_future(scene.watch(scene))
        await scene.until(lambda: len(scene.log(ev.DeathCharged)) == MOST_DEATHS - 2)
        await scene.kill_coordinator(0.5)
        await task

    scene = Neighbours(steps=10_000)
    scene.play = watch
    states = ends_as_it_scores(scene, monkeypatch)
    assert states[scene.evil] == "FAILED"
    assert [event.count for event in scene.log(ev.DeathCharged)] == [*range(1, MOST_DEATHS + 1)]


def test_a_scorer_that_ends_the_reward_service_as_it_loads_is_charged(monkeypatch):
    """The first death is another's doing: then the scorers are loaded again, and end each instance."""
    opens = Reward.OpenRun

    async def open_run(self, request):
        if scene.dies_of(request.header.run, self):
            while self.alive:  # noqa: ASYNC110  the connection breaks with it
                await asyncio.sleep(0.01)
            raise InstanceDown(self.incarnation, "connection reset")
        return await opens(self, request)

    async def watch(scene):
        task = asyncio.ensure_future(scene.watch(scene))
        await scene.until(lambda: scene.evil)
        await scene.kill(next(each.incarnation for each in scene.instances.values() if each.KIND == "reward"))
        await task

    scene = Neighbours(steps=10_000)
    scene.play = watch
    monkeypatch.setattr(Reward, "OpenRun", open_run)
    states = ends(scene)
    check(scene, states, scene.specs[0].reward.scorers[0].name)


@pytest.mark.parametrize("simulators", [1, 2])
def test_an_environment_that_ends_the_simulator_is_charged_and_its_neighbour_is_not(monkeypatch, simulators):
    stands = Simulator.stands

    def step(self, pool, header):
        return not scene.dies_of(self.pools.get(pool, ""), self) and stands(self, pool, header)

    scene = Neighbours()
    scene.specs = [embodied(5, rollouts=1, steps=10_000) for _ in range(2)]
    scene.counts["simulator"] = simulators
    monkeypatch.setattr(Simulator, "stands", step)
    check(scene, ends(scene), "reach, push")


def test_deaths_with_steps_between_fail_no_run(monkeypatch):
    """A reward instance that is killed now and then, from outside, with a run's answers in hand."""
    scores, struck = Reward.Score, set()

    async def score(self, requests):
        async def looked_at():
            async for request in requests:
                step = len(scene.log(ev.StepCommitted))
                if step % 2 and step not in struck:
                    struck.add(step)
                    scene.spawn(scene.kill(self.incarnation))
                    await asyncio.Event().wait()
                yield request

        async for response in scores(self, looked_at()):
            yield response

    async def play(scene):
        await scene.first()

    monkeypatch.setattr(Reward, "Score", score)
    scene = Scene(play, steps=20)
    assert list(ends(scene).values()) == ["SUCCEEDED"]
    assert len(struck) > MOST_DEATHS and not scene.log(ev.RunRecovering)
