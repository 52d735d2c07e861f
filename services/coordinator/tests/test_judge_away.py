"""A run whose judge is away as it opens its scorers: it waits, says so, and ends only after `limits.step_timeout_s`."""

import asyncio

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.fleet.instance_client import SCORER_AWAY, CallRefused
from headrace_simulation.fleet.reward import Reward
from scene import Scene, ends, trained_once

FOR_EVER = 1e9
WHY = "reward.scorers[0].options.base_url: the judge is not there"


@pytest.fixture
def away(monkeypatch):
    """Set to the time until which no reward instance can open a run, by the loop's clock."""
    until = {"time": 0.0}
    plain = Reward.OpenRun

    async def open_run(self, request):
        if asyncio.get_running_loop().time() < until["time"]:
            raise CallRefused(self.incarnation, SCORER_AWAY, WHY, "reward.scorers[0].options.base_url")
        return await plain(self, request)

    monkeypatch.setattr(Reward, "OpenRun", open_run)
    return until


def scene(away, seconds):
    async def play(world):
        run = await world.first()
        if seconds == FOR_EVER:
            world.users.doomed.add(run)
        away["time"] = asyncio.get_running_loop().time() + seconds
        for each in world.living("reward"):
            await world.kill(each.incarnation)
        await world.until(lambda: world.state(run) in run_states.TERMINAL)

    return Scene(play, limits={"recoveries": 50, "step_timeout_s": 300})


def test_it_goes_on_when_the_judge_is_back(away):
    world = scene(away, 120)
    (state,) = ends(world).values()
    assert state == "SUCCEEDED"
    (run,) = {event.run for event in world.log(ev.StepCommitted)}
    assert trained_once(world, run)


def test_it_fails_with_the_key_once_the_limit_has_passed(away):
    world = scene(away, FOR_EVER)
    (state,) = ends(world).values()
    assert state == "FAILED"
    last = world.log(ev.RunStateChanged)[-1]
    assert last.reason.startswith("the judge is not there; ") and "limits.step_timeout_s" in last.reason
