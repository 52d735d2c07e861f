"""A session's client against a scripted coordinator: what of a loop is sent together, and what each call then gets."""

from __future__ import annotations

import pytest
from headrace.client import Client, HeadraceError, Training
from headrace_schema.sessions import SessionView

SESSION = SessionView(
    session="s",
    state="RUNNING",
    reason="",
    model="m",
    lora_rank=0,
    max_tokens=8,
    step=0,
    version=1,
    published=1,
    next_seq=1,
)
BAD = 9


@pytest.fixture
def training(coordinator):
    made = []

    def ask(got):
        prompts = [each["prompt"][0] for each in got.body["samples"]]
        if BAD in prompts:
            return 422, {"reason": "INVALID", "message": "weights: there is no such session", "problems": []}
        made.extend(prompts)
        return 202, {"futures": [f"sample:{prompt}" for prompt in prompts]}

    def tell(got):
        there = [name for name in got.query["future"] if name != "sample:3" or got.query["future"][0] == name]
        sequence = {"log_probs": [-1.0], "stop_reason": "stop"}
        return 200, {
            "results": {
                name: {"kind": "sample", "version": 1, "sequences": [{"tokens": [int(name[7:])], **sequence}]}
                for name in there
            }
        }

    coordinator.routes["GET /v1/sessions/s"] = (200, SESSION.model_dump())
    coordinator.routes["POST /v1/sessions/s/samples"] = ask
    coordinator.routes["GET /v1/sessions/s/results"] = tell
    with Client(coordinator.url, "secret", patience_s=0) as client:
        yield Training(client, session="s")


def test_samples_of_a_step_are_asked_for_together_and_told_together(training, coordinator):
    calls = [training.sample([prompt]) for prompt in range(6)]
    assert [call.result(30).sequences[0].tokens for call in calls] == [[prompt] for prompt in range(6)]
    asked = coordinator.requests("POST /v1/sessions/s/samples")
    assert len(asked) < 6 and sum(len(each.body["samples"]) for each in asked) == 6
    told = coordinator.requests("GET /v1/sessions/s/results")
    assert len(told) <= 1 + len(asked), "the first one brings the others, but for one that had no result yet"
    assert calls[0].result() is calls[0].result()


def test_one_that_is_refused_leaves_the_others_of_its_request(training):
    calls = {prompt: training.sample([prompt]) for prompt in (1, BAD, 2)}
    with pytest.raises(HeadraceError, match="there is no such session"):
        calls.pop(BAD).result(30)
    assert [call.result(30).sequences[0].tokens for call in calls.values()] == [[1], [2]]
