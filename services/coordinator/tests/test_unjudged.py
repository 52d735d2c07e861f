"""A run none of whose answers has a verdict: its user hears of it at once, and it does not succeed."""

import pytest
from headrace.reward.v1 import reward_pb2 as reward
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.run_states import FAILED, SUCCEEDED
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.judging.judge import Violation
from headrace_simulation.virtual_time import run_virtual
from scene import Scene


@pytest.mark.parametrize(("judged", "state"), [(0, FAILED), (40, SUCCEEDED)])
def test_a_run_without_a_verdict_warns_and_fails_by_name(monkeypatch, judged, state):
    """A rollout's answers all get reward.failed_reward, as of a judge whose every reply cannot be read."""
    answers, count = Reward.Score, [0]

    async def unreadable(self, requests):
        async for response in answers(self, requests):
            for result in response.results:
                if result.evaluation:
                    continue
                count[0] += 1
                result.status = reward.SCORE_STATUS_OK
                if count[0] > judged:
                    result.status = reward.SCORE_STATUS_ANSWER_FAILED
                    result.detail = "judge: the judge's verdict cannot be read: hm"
            yield response

    monkeypatch.setattr(Reward, "Score", unreadable)

    async def watch(scene):
        await scene.until(lambda: len(scene.log(ev.StepCommitted)) >= 3)

    scene = Scene(watch, steps=3)
    try:
        run_virtual(scene.live())
    except Violation as fault:
        assert state == FAILED and f"ended {FAILED}" in str(fault), (
            "the simulation expects every run to succeed"
        )
    (moved,) = [each for each in scene.log(ev.RunStateChanged) if each.state in (FAILED, SUCCEEDED)]
    assert moved.state == state
    if state == FAILED:
        assert "no answer has a verdict" in moved.reason and "cannot be read: hm" in moved.reason
        warned = [each.warnings["verdicts"] for each in scene.log(ev.Warned) if "verdicts" in each.warnings]
        assert warned and "no answer of the last step has a verdict" in warned[0]
