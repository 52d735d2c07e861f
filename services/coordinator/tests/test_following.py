"""Runs that begin after others: who waits, what each begins with, what becomes of it, and which names are refused."""

from __future__ import annotations

import pytest
from admission_parts import admit_all, fleet, spec
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.demand import instances_wanted
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.pipelines import following, pipeline, settled_followers
from headrace_coordinator.domain.state import restore, snapshot
from headrace_schema.problems import Impossible, sentence
from headrace_schema.resources.views import RunView
from headrace_schema.spec import RunSpec

BEFORE = {**spec(), "export": True}


def submit(state, run, *follows, at=0.0):
    state.apply(ev.RunSubmitted(at=at, run=run, spec=spec(), directory=f"/runs/{run}", follows=list(follows)))
    return state.runs[run]


def end(state, run, how, at=9.0, path=""):
    if path:
        state.apply(ev.ModelExported(at=at, run=run, path=path, number=1))
    state.apply(ev.RunReleased(at=at, run=run))
    state.apply(ev.RunStateChanged(at=at, run=run, state=how, reason="why"))


def settle(state):
    for events in [*settled_followers(state)]:
        for event in events:
            state.apply(event)


@pytest.fixture
def chained():
    """sft runs, and dpo and rl wait for it, one behind the other."""
    state = fleet(rollouts=2, trainers=2)
    submit(state, "sft-1")
    submit(state, "dpo-1", "sft-1", at=1.0)
    submit(state, "rl-1", "sft-1", "dpo-1", at=2.0)
    admit_all(state, 3.0)
    return state


def test_a_follower_holds_nothing_and_says_for_whom_it_waits(chained):
    assert [run.id for run in chained.runs.values() if run.grant] == ["sft-1"]
    plan = plan_admission(chained, 4.0)
    assert plan.waiting == {"dpo-1": "run sft-1 to succeed", "rl-1": "run dpo-1 to succeed"}
    assert not plan.yields, "nobody makes room for what may not begin"
    alone = fleet(rollouts=2, trainers=2)
    submit(alone, "sft-1")
    assert instances_wanted(chained) == instances_wanted(alone)
    assert [pipeline(chained, each, chained.runs[each].follows) for each in chained.runs] == [
        ["sft-1", "dpo-1", "rl-1"]
    ] * 3


def test_it_begins_with_the_export_of_the_run_before(chained):
    end(chained, "sft-1", "SUCCEEDED", path="/runs/sft-1/export")
    chained.runs["dpo-1"].spec["model"] |= {"path": "", "policy": POLICY}
    settle(chained)
    again = restore(snapshot(chained))
    admit_all(again, 11.0)
    assert again.runs["dpo-1"].state == "RUNNING" and again.runs["rl-1"].state == "QUEUED"
    model = again.runs["dpo-1"].spec["model"]
    assert (model["path"], model["policy"]) == ("/runs/sft-1/export", None)
    assert again.runs["rl-1"].awaited == "dpo-1"


def test_it_begins_with_one_that_was_archived_meanwhile(chained):
    end(chained, "sft-1", "SUCCEEDED", path="/runs/sft-1/export")
    chained.apply(ev.RunArchived(at=9.0, run="sft-1", state="SUCCEEDED", created_at=0.0))
    settle(chained)
    assert chained.runs["dpo-1"].spec["model"]["path"] == "/runs/sft-1/export"


@pytest.mark.parametrize("how", ["FAILED", "CANCELLED", "deleted"])
def test_all_that_come_after_are_cancelled_when_it_ends_otherwise(chained, how):
    end(chained, "sft-1", "FAILED" if how == "deleted" else how)
    if how == "deleted":
        chained.apply(ev.RunArchived(at=9.0, run="sft-1", state="FAILED", created_at=0.0))
        chained.apply(ev.RunDeleted(at=9.0, run="sft-1"))
    settle(chained)
    settle(chained)
    assert [chained.runs[each].state for each in ("dpo-1", "rl-1")] == ["CANCELLED"] * 2
    assert "run sft-1, with whose export it would begin" in chained.runs["dpo-1"].reason


def follower(**changes):
    made = spec() | {"after": "sft", "model": {"dtype": "float32"}} | changes
    return RunSpec.model_validate({key: value for key, value in made.items() if value is not None})


POLICY = {"kind": "mlp", "state_size": 3}
ROBOT = {
    **dict.fromkeys(("data", "reward", "sampling", "prompt", "rollout", "evaluation")),
    "workflow": "embodied",
    "environment": {"tasks": ["Pendulum-v1"]},
    "algorithm": {"name": "ppo", "group_size": 1},
}


def origin(state="RUNNING", **changes):
    return RunView.from_json(
        {
            "id": "sft-1",
            "state": state,
            "spec": {**BEFORE, "model": {"path": "org/base", "revision": "r"}},
            **changes,
        }
    )


def test_a_name_is_the_newest_run_that_has_it_and_its_model_is_the_followers():
    asked = []

    def look(name):
        asked.append(name)
        return origin()

    found, follows = following(follower(), ["x-9", "sft-7", "sft-1"], look)
    assert asked == ["sft-7"] and found.after == "sft-1" and follows == ["sft-1"]
    assert (found.model.path, found.model.revision, found.model.dtype) == ("org/base", "r", "float32")
    ended = origin("SUCCEEDED", export_path="/e", pipeline=["a-1", "sft-1", "b-1"])
    found, follows = following(follower(), ["sft-1"], lambda _: ended)
    assert (found.model.path, found.model.revision, follows) == ("/e", None, ["a-1", "sft-1"])


def test_a_robot_policy_is_of_the_form_of_the_run_before_until_its_export_is_there():
    model, data = {"path": "", "policy": POLICY}, {"source": "lerobot"}
    shown = {**BEFORE, "workflow": "supervised", "model": model, "data": data}
    found, _ = following(follower(**ROBOT), ["sft-1"], lambda _: origin(spec=shown))
    assert (found.model.path, found.model.policy) == ("", POLICY)
    ended = origin("SUCCEEDED", spec=shown, export_path="/e")
    found, _ = following(follower(**ROBOT), ["sft-1"], lambda _: ended)
    assert (found.model.path, found.model.policy) == ("/e", None)


@pytest.mark.parametrize(
    ("before", "changes", "said"),
    [
        (origin(), {"after": "stf"}, "after: there is no run stf; did you mean sft?"),
        (origin(), {"model": {"path": "own"}}, "model.path: 'own' is given, and the run begins with the export of sft"),
        (origin("FAILED"), {}, "after: run sft-1 is FAILED: it will export nothing"),
        (origin(spec={**BEFORE, "export": False}), {}, "after: run sft-1 exports nothing; set export: true"),
        (origin("SUCCEEDED"), {}, "after: run sft-1 exports nothing"),
        (origin(spec={**BEFORE, "workflow": "reward_model"}), {}, "exports a classifier, which generates nothing"),
        (origin(spec={**BEFORE, "policies": {"b": {}}}), {}, "exports no model alone"),
        (origin(spec={**BEFORE, "workflow": "embodied"}), {}, "exports a robot policy, and this run trains a language"),
        (origin(), ROBOT, "run sft-1 exports a language model, and this run trains a robot policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_told(before, changes, said):
    with pytest.raises(Impossible) as refused:
        following(follower(**changes), ["sft-1"], lambda _: before)
    assert said in sentence(refused.value.problems[0])
