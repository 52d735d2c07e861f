"""Answers that an environment, an engine or a scorer failed at count in no figure of an evaluation."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace_coordinator.domain import events as ev
from headrace_coordinator.projections.transcripts import Answer
from headrace_coordinator.run.evaluation.suite_figures import result_of, values
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_simulation.fleet.reward import Reward, reward_of
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.judging.world import WorldJudge
from headrace_simulation.virtual_time import run_virtual
from scene import Scene, ends

ASKED, FELL, RAISED = 16, "the arm fell off", "ZeroDivisionError: division by zero"


@pytest.fixture
def failing(monkeypatch):
    """Has every other answer be right, and those of the ordinals that it is told fail."""

    def begin(died=(), raised=(), after_steps=0):
        make = Rollout._make

        async def dies(self, opening, group, sample, done):
            late = getattr(self.version, "ordinal", 0) >= after_steps
            if not (opening.evaluation and late and group.prompt_ordinal in died):
                return await make(self, opening, group, sample, done)
            key = common.SlotKey(prompt_ordinal=group.prompt_ordinal, sample_index=sample.sample_index)
            text = json.dumps({"return": 0.0, "success": False, "steps": 0, "error": FELL})
            ended = common.FINISH_REASON_ERROR
            done.put_nowait(
                common.Trajectory(sample=key, attempt=1, finish_reason=ended, completion_text=text)
            )

        async def scores(self, requests):
            async for request in requests:
                for item in request.items:
                    fails = item.evaluation and item.sample.prompt_ordinal in raised
                    yield reward.ScoreResponse(
                        results=[
                            reward.ScoreResult(
                                sample=item.sample,
                                attempt=item.attempt,
                                status=reward.SCORE_STATUS_ANSWER_FAILED if fails else reward.SCORE_STATUS_OK,
                                detail=RAISED if fails else "",
                                reward=_reward_of(item, fails),
                                evaluation=item.evaluation,
                            )
                        ]
                    )

        monkeypatch.setattr(Rollout, "_make", dies)
        monkeypatch.setattr(WorldJudge, "judge", unjudged)  # It knows no scores but its own.
        monkeypatch.setattr(Reward, "Score", scores)

    return begin


def _reward_of(item, fails):
    if item.evaluation:
        return 0.0 if fails else 1.0
    return reward_of(item.sample.prompt_ordinal, item.sample.sample_index)


async def unjudged(self):
    return SimpleNamespace(states={})


async def nothing(scene):
    return None


def played(**evaluation):
    scene = Scene(
        nothing,
        steps=2,
        data={"heldout": ASKED, "options": {"digits": 2}},
        evaluation={"every": 1, **evaluation},
    )
    states = ends(scene)
    views = [event.view for event in scene.log(ev.Evaluated)]
    return scene, [*states.values()], views


@pytest.mark.parametrize(("fault", "why"), [("died", FELL), ("raised", RAISED)])
def test_what_failed_does_not_count_as_the_policys_failure(failing, fault, why):
    failing(**{fault: range(0, ASKED, 4)})
    _, _, views = played()
    assert [view["step"] for view in views] == [0, 1, 2]
    for view in views:
        assert (view["score"], view["answers"], view["unanswered"]) == (1.0, 12, 4)
        assert view["failure"] == why and view["pass_at"] == {"1": 1.0}


def test_a_run_whose_first_evaluation_lacks_too_many_fails_before_it_trains(failing):
    failing(died=range(5))
    scene, _, views = played()
    last = scene.log(ev.RunStateChanged)[-1]
    assert last.state == "FAILED" and not views and not scene.log(ev.StepCommitted)
    assert last.reason.startswith(f"{FELL}; 5 of 16 answers")
    assert last.reason.endswith("(evaluation.max_unanswered)")


def test_more_may_be_missing_where_the_spec_says_so(failing):
    failing(died=range(12))
    _, _, views = played(max_unanswered=0.75)
    assert [(view["score"], view["unanswered"]) for view in views] == [(1.0, 12)] * 3


def test_an_evaluation_without_any_answer_has_no_figure(failing):
    failing(died=range(ASKED))
    scene, _, views = played(max_unanswered=1.0)
    assert scene.log(ev.RunStateChanged)[-1].state == "FAILED" and not views


def test_a_later_evaluation_that_lacks_too_many_is_noted_and_the_run_goes_on(failing):
    failing(died=range(ASKED), after_steps=1)
    scene, _, views = played()
    assert scene.log(ev.RunStateChanged)[-1].state == "SUCCEEDED"
    assert [view["step"] for view in views] == [0]
    noted = [event.text for event in scene.log(ev.Noted) if "no evaluation" in event.text]
    assert [text.rpartition("; ")[2] for text in noted] == [
        f"no evaluation (heldout) at step {step}" for step in (1, 2)
    ]


def asked(samples, **more):
    return EvaluationSpec.model_validate(
        {
            "model": {"path": "m"},
            "suite": {"name": "math500"},
            "samples": samples,
            "sampling": {"temperature": 1.0},
            **more,
        }
    )


def test_each_mode_leaves_out_what_failed():
    """Of four answers to each of two items one failed at the first item, and all at the second."""
    good, bad = Answer(1.0, {}, "1", 1, cut=False), Answer(0.0, {}, "2", 1, cut=False)
    failed = Answer(0.0, {}, "", 0, cut=False, failure=FELL)
    rows = [[good, failed, bad, good], [failed] * 4]
    found = {(item, sample): each for item, row in enumerate(rows) for sample, each in enumerate(row)}
    suite, spec = open_suite("math500", {}), asked(4)
    assert values("avg@4", spec, suite, found, 2) == {0: pytest.approx(2 / 3)}
    assert values("maj@4", spec, suite, found, 2) == {0: 1.0}
    assert values("pass@2", spec, suite, found, 2) == {0: 1.0}
    assert values("pass@4", spec, suite, found, 2) == {}, "of three answers nobody knows pass@4"
    result = result_of(spec, suite, found, [None, None])
    assert (result.answers, result.unanswered, result.failure) == (3, 5, FELL)
    assert [each.mode for each in result.modes] == ["avg@4", "maj@4"] and result.tokens_mean == 1.0


class Evaluating(Scene):
    """A run, and one evaluation of the simulated model."""

    def __init__(self, **more):
        super().__init__(self.evaluate, steps=1)
        self.more, self.result = more, None

    async def evaluate(self, _):
        spec = EvaluationSpec.model_validate(
            {
                "model": {"path": "simulated"},
                "suite": {"name": "items", "options": {"source": "copy_digits"}, "limit": ASKED},
                **self.more,
            }
        )
        self.name = await self.coordinator.submissions.submit(spec, "evaluate")
        self.users.evaluators.specs[self.name] = spec
        await self.until(lambda: self.state(self.name) in ("SUCCEEDED", "FAILED"))


@pytest.mark.parametrize("fault", ["died", "raised"])
def test_an_evaluation_of_a_suite_says_what_is_missing(failing, fault):
    failing(**{fault: range(0, ASKED, 4)})
    scene = Evaluating()
    run_virtual(scene.live())
    (event,) = scene.log(ev.SuiteEvaluated)
    result = event.result
    assert (result["modes"][0]["score"], result["answers"], result["unanswered"]) == (1.0, 12, 4)
    reasons = [event.reason for event in scene.log(ev.RunStateChanged) if event.run == scene.name]
    assert reasons[-1] == "12 answers to 16 items, 4 not answered"


def test_an_evaluation_of_a_suite_ends_as_soon_as_too_many_are_missing(failing):
    failing(raised=range(0, ASKED, 4))
    scene = Evaluating(max_unanswered=0.2)
    run_virtual(scene.live())
    assert not scene.log(ev.SuiteEvaluated)
    last = [event for event in scene.log(ev.RunStateChanged) if event.run == scene.name][-1]
    assert last.state == "FAILED" and "; 4 of 16 answers" in last.reason
    assert last.reason.endswith("(max_unanswered)")
    assert RAISED in last.reason
