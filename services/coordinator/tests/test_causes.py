"""A run's user reads first what failed, then what that did to the run, then the key that bounds it."""

import json

import pytest
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.judging.judge import Violation
from headrace_simulation.virtual_time import run_virtual
from scene import Scene

CAUSE = "gripper 7 lost its CAN bus"
HELD_OUT = {"data": {"heldout": 16, "options": {"digits": 2}}, "evaluation": {"every": 1}}


def first_the_cause(text, *behind):
    """The text, in which the cause stands before all else."""
    assert CAUSE in text, text
    for each in behind:
        assert 0 <= text.index(CAUSE) < text.find(each), text
    return text


def environment(monkeypatch, after_steps=0):
    """Environments fail in evaluations."""
    make = Rollout._make

    async def dies(self, opening, group, sample, done):
        if not opening.evaluation or getattr(self.version, "ordinal", 0) < after_steps:
            return await make(self, opening, group, sample, done)
        text = json.dumps({"return": 0.0, "success": False, "steps": 0, "error": CAUSE})
        done.put_nowait(
            common.Trajectory(
                sample=common.SlotKey(prompt_ordinal=group.prompt_ordinal, sample_index=sample.sample_index),
                attempt=1,
                finish_reason=common.FINISH_REASON_ERROR,
                completion_text=text,
            )
        )

    monkeypatch.setattr(Rollout, "_make", dies)


def scorer(monkeypatch, status, evaluation=False):
    """The scorer fails at every answer that is learned from, or at every held-out one."""

    answers = Reward.Score

    async def scores(self, requests):
        async for response in answers(self, requests):
            for result in response.results:
                if result.evaluation == evaluation:
                    result.status, result.detail = status, CAUSE
            yield response

    monkeypatch.setattr(Reward, "Score", scores)


def refuses(monkeypatch, service, method, reason, key=""):
    async def refused(self, request):
        raise CallRefused(self.incarnation, reason, f"{key}: {CAUSE}" if key else CAUSE, key)

    monkeypatch.setattr(service, method, refused)


BROKEN, FAILED = reward.SCORE_STATUS_SCORER_BROKEN, reward.SCORE_STATUS_ANSWER_FAILED
AWAY = reward.SCORE_STATUS_UNAVAILABLE
PLACES = {
    "an evaluation's environments": (environment, (), HELD_OUT, "evaluation.max_unanswered"),
    "an evaluation's scorer": (scorer, (FAILED, True), HELD_OUT, "evaluation.max_unanswered"),
    "a broken scorer": (scorer, (BROKEN,), {"steps": 30}, "limits.max_drop_rate"),
    "a broken scorer, all allowed": (
        scorer,
        (BROKEN,),
        {"limits": {"max_drop_rate": 1.0}},
        "nothing was trained",
    ),
    "no verdict": (scorer, (FAILED,), {}, "reward.scorers"),
    "a scorer that stays away": (scorer, (AWAY,), {"limits": {"step_timeout_s": 60}}, "limits."),
    "a trainer": (
        refuses,
        (Trainer, "CommitStep", "ENGINE_FAILED"),
        {"limits": {"recoveries": 2}},
        "limits.rec",
    ),
    "a spec's key": (
        refuses,
        (Reward, "OpenRun", "INVALID", "reward.scorers[0].name"),
        {},
        "reward.scorers[0].name",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_failed_runs_reason_begins_with_the_cause(monkeypatch, place):
    plant, given, spec, key = PLACES[place]

    async def watch(scene):
        await scene.until(lambda: any(each.state == "FAILED" for each in scene.log(ev.RunStateChanged)))

    scene = Scene(watch, **{"steps": 3, **spec})
    plant(monkeypatch, *given)
    try:
        run_virtual(scene.live())
    except (Violation, AssertionError) as fault:
        assert "FAILED" in str(fault), "the simulation expects every run to succeed"
    (failed,) = [each for each in scene.log(ev.RunStateChanged) if each.state == "FAILED"]
    first_the_cause(failed.reason, key)
    for note in scene.log(ev.Noted):
        if CAUSE in note.text and key in note.text:
            first_the_cause(note.text, key)


def test_the_note_of_a_later_evaluation_begins_with_the_cause(monkeypatch):
    async def nothing(scene):
        return None

    environment(monkeypatch, after_steps=1)
    scene = Scene(nothing, steps=2, **HELD_OUT)
    assert run_virtual(scene.live()).states
    noted = [each.text for each in scene.log(ev.Noted) if "no evaluation" in each.text]
    assert len(noted) == 2
    for text in noted:
        first_the_cause(text, "evaluation.max_unanswered", "no evaluation (heldout) at step")
