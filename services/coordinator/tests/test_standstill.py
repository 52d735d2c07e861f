"""A step that stands still for many times as long as its stage takes: the run's user hears who is awaited."""

import asyncio

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.runs import STALLED
from headrace_coordinator.run.standstill import LEAST_S
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.trainer import Trainer
from scene import Scene, ends


def hold(monkeypatch, service, method, seconds):
    """The service's answers after the first step wait so long, once."""
    answers, held = getattr(service, method), []

    async def first_waits(self, request):
        if scenes[0].log(ev.StepCommitted) and not held:
            held.append(True)
            await asyncio.sleep(seconds)

    async def call(self, request):
        await first_waits(self, request)
        return await answers(self, request)

    async def stream(self, requests):
        async for response in answers(self, requests):
            await first_waits(self, response)
            yield response

    monkeypatch.setattr(service, method, stream if method == "Score" else call)
    scenes = []
    return scenes


@pytest.mark.parametrize(
    ("service", "method", "stage", "awaited"),
    [(Reward, "Score", "score", "reward-0 to score"), (Trainer, "CommitStep", "learn", "trainer-0 to learn")],
)
def test_the_user_hears_of_a_standstill_once_and_of_its_end(monkeypatch, service, method, stage, awaited):
    async def watch(scene):
        await scene.until(lambda: len(scene.log(ev.StepCommitted)) >= 4)

    scenes = hold(monkeypatch, service, method, 90.0)
    scene = Scene(watch)
    scenes.append(scene)
    ends(scene)
    told = [event for event in scene.log(ev.Warned) if STALLED in event.warnings]
    assert len(told) == 1
    text = told[0].warnings[STALLED]
    assert text.startswith("no progress for ") and f"in the stage {stage}, " in text and awaited in text
    assert LEAST_S <= float(text.split()[3]) < 90.0
    after = [event for event in scene.log(ev.Warned) if event.at > told[0].at]
    assert after and STALLED not in after[0].warnings


def test_a_wait_that_is_short_beside_the_stage_is_not_told_of(monkeypatch):
    async def watch(scene):
        await scene.until(lambda: len(scene.log(ev.StepCommitted)) >= 4)

    scenes = hold(monkeypatch, Reward, "Score", LEAST_S / 2)
    scene = Scene(watch)
    scenes.append(scene)
    ends(scene)
    assert not scene.log(ev.Warned)
