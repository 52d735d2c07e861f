"""Robot policies that choose categories, with real services; and what is said where an environment says no success."""

from __future__ import annotations

from typing import Any

import pytest
from harness.environments import levers
from harness.fleet import Fleet
from harness.ledger import audit
from harness.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_simulator")
STEPS, BATCH = 2, 4
SUITE = {"starts": 4}


def spec(kind: str, task: str, algorithm: str, **more: Any) -> dict[str, Any]:
    """A run that leaves out all sizes."""
    group = 2 if algorithm == "grpo" else 1
    return {
        "name": f"{kind}-{algorithm}",
        "workflow": "embodied",
        "steps": STEPS,
        "model": {"policy": {"kind": kind, "hidden": [16]}},
        "environment": {"tasks": [task], "count": 4},
        "data": {"heldout": 4, "options": {"starts": 64}},
        "algorithm": {"name": algorithm, "group_size": group, "prompts_per_step": BATCH},
        "evaluation": {"every": STEPS},
        "export": True,
        **more,
    }


def judged(fleet: Fleet, task: str, source: dict[str, Any]) -> Any:
    """What `headrace eval` finds of a policy."""
    suite = {"name": "episodes", "options": {"environment": {"tasks": [task], "count": 4}, **SUITE}}
    made = fleet.client.evaluate({"suite": suite, **source})
    found = wait_for(
        lambda: now if (now := fleet.client.evaluation(made.id)).ended else None, f"{made.id} to end", 240
    )
    assert found.state == "SUCCEEDED", found.reason
    return found


def test_cartpole_is_trained_and_judged_by_its_return(fleet: Fleet):
    run = fleet.succeed(fleet.submit(spec("mlp", "CartPole-v1", "ppo")))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH
    for step in fleet.client.metrics(run.id):
        assert step.figures["log_prob_mismatch_max"] < 1e-5
        # Both are on one host: a reset and as many steps as were learned of, at least, and none of them by gRPC.
        assert step.figures["operations_by_socket"] >= BATCH + step.tokens
        assert "operations_by_grpc" not in step.figures
    for view in run.evaluations:
        assert view.measure == "return" and "never says success" in view.note
        assert view.episodes == {"return": view.score, "steps": view.score}, "each action has a reward of 1"
    assert f"{run.evaluations[-1].score:.3f} return" in fleet.headrace("run", "get", run.id).stdout
    exported = judged(fleet, "CartPole-v1", {"model": {"path": run.export_path, "dtype": "float32"}})
    again = judged(fleet, "CartPole-v1", {"checkpoint": {"run": run.id}})
    assert (
        exported.result.modes[0].score == again.result.modes[0].score == again.result.episodes["return"] > 1
    )
    assert again.result.measure == "return" and "success" not in again.result.episodes
    assert "never says success" in fleet.headrace("eval", "get", again.id).stdout


@pytest.mark.nightly  # quick: cartpole above; test_simulator_spaces.py
def test_mixed_actions_from_stacked_frames_keep_success_once_and_at_the_end(fleet: Fleet):
    task = f"{levers.__file__}:make_env"
    at_end = [{"name": "episode", "options": {"of": "success_at_end"}}]
    reward = {"scorers": [{"name": "episode"}], "evaluation": at_end}
    run = fleet.succeed(fleet.submit(spec("cnn", task, "grpo", reward=reward)))
    assert len(audit(fleet, run).trained) == STEPS * BATCH * 2
    assert all(step.figures["log_prob_mismatch_max"] < 1e-4 for step in fleet.client.metrics(run.id))
    (fitted,) = [event.data for event in fleet.events(run) if event.type == "policy_fitted"]
    assert (fitted["policy"]["categories"], fitted["policy"]["channels"]) == ([0, levers.LEVERS], 2)
    assert (fitted["state"], fitted["cameras"]) == (["last"], {"frames": "frames"})
    last = run.evaluations[-1]
    assert (last.measure, last.score, last.note) == ("success_at_end", 0.0, "")
    assert (last.episodes["success"], last.episodes["success_at_end"]) == (1.0, 0.0)
    # By itself an evaluation of a run ends at the first success; one of a suite goes on.
    found = judged(fleet, task, {"checkpoint": {"run": run.id}}).result
    assert (found.measure, found.modes[0].score) == ("success", 1.0)
    assert (found.episodes["success_at_end"], found.episodes["steps"]) == (0.0, levers.STEPS)


def test_environments_that_one_call_steps_train_a_policy_and_lose_no_episode(fleet: Fleet):
    own = {"tasks": ["Pendulum-v1"], "count": 4, "vectorized": True, "processes": 2, "max_episode_steps": 20}
    run = fleet.succeed(fleet.submit(spec("mlp", "Pendulum-v1", "ppo", environment=own)))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH and not found.dropped
    assert all(step.figures["log_prob_mismatch_max"] < 1e-5 for step in fleet.client.metrics(run.id))
    assert all(view.episodes["steps"] == 20 for view in run.evaluations)


@pytest.mark.nightly  # quick: the environments above, which one call steps too
def test_poles_that_one_call_steps_fall_at_different_times_and_none_is_lost(fleet: Fleet):
    own = {
        "tasks": ["CartPole-v1"],
        "count": 8,
        "vectorized": True,
        "options": {"vectorization_mode": "sync"},
    }
    data = {"heldout": 12, "options": {"starts": 64}}
    run = fleet.succeed(fleet.submit(spec("mlp", "CartPole-v1", "ppo", environment=own, data=data)))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH and not found.dropped
    assert [view.answers for view in run.evaluations] == [12] * len(run.evaluations)
    assert all(not view.unanswered for view in run.evaluations)
