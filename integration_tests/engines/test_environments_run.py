"""Whole runs in environments of others whose simulators have a Python of their own: `make test-simulators SIM=…`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT
from headrace.client import HeadraceError

SIM = os.environ.get("BACKEND_UNDER_TEST", "")
EXAMPLES = ROOT / "examples" / "environments"
STEPS, GROUPS, SAMPLES = 2, 2, 4
LONGEST_S = 420.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Its simulator has the environments; other fixtures of that name share a fleet that has not."""
    with Fleet(tmp_path_factory.mktemp("fleet") / "data", "--sim", SIM, "--simulator", "1") as fleet:
        yield fleet


def example(name: str, model: Path) -> dict[str, Any]:
    """An example's spec with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(model)
    spec["environment"] |= {"count": 4}
    spec["data"]["heldout"] = 0
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    if "agent" in spec:
        spec["agent"]["task"] = str(EXAMPLES / "guess_v1")
    return spec | {"steps": STEPS, "evaluation": {"every": 0}, "export": False}


@pytest.mark.skipif(SIM != "verifiers", reason="make test-simulators SIM=verifiers runs this")
def test_a_packaged_environment_trains_unchanged_and_what_it_cost_is_told(fleet, tiny_model):
    run = fleet.succeed(fleet.submit(example("verifiers", tiny_model)), LONGEST_S)
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == STEPS * GROUPS * SAMPLES
    assert {talk.reward for talk in talks} <= {-0.5, 0.0, 1.0}
    for talk in talks:
        said = [message for message in talk.messages if message.role == "assistant"]
        assert talk.figures["turns"] == len(said) and talk.figures["errors"] == 0.0
        assert talk.figures["output_tokens"] == sum(message.tokens for message in said)
        assert talk.figures["reward_right"] == talk.reward
    for step in fleet.client.metrics(run.id):
        turns = [talk.figures["turns"] for talk in talks if talk.step == step.step]
        assert step.figures["agent_turns"] == pytest.approx(sum(turns) / len(turns))
    for certificate in found.live:
        assert certificate.log_prob_mismatch_mean < 1e-3


@pytest.mark.skipif(SIM != "verifiers", reason="make test-simulators SIM=verifiers runs this")
def test_a_submission_names_what_is_no_taskset_and_who_leads(fleet, tiny_model, tmp_path):
    spec = example("verifiers", tiny_model)
    older = tmp_path / "older.py"
    older.write_text("import verifiers as vf\n\n\ndef load_environment():\n    return vf.SingleTurnEnv()\n")
    wrong = [
        ({"task": "nowhere-v1"}, "agent.task", "not found"),
        ({"task": str(older)}, "agent.task", "is of another verifiers"),
        ({"options": {"taskset": {"rosw": 3}}}, "agent.options.taskset.rosw", "verifiers refuses it"),
    ]
    for more, key, words in wrong:
        with pytest.raises(HeadraceError) as caught:
            fleet.submit({**spec, "agent": {**spec["agent"], **more}})
        (problem,) = caught.value.problems
        assert problem.key == key and words in problem.problem, problem
    led = {**spec, "environment": {"backend": "verifiers", "tasks": [str(EXAMPLES / "guess_v1")]}}
    del led["agent"]
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(led)
    (problem,) = caught.value.problems
    assert problem.key == "environment.backend" and problem.fix.startswith(
        "write agent: {backend: verifiers, task: "
    )


@pytest.mark.skipif(SIM != "web", reason="make test-simulators SIM=web runs this")
def test_a_model_is_trained_in_a_browser(fleet, tiny_model):
    run = fleet.succeed(fleet.submit(example("shop", tiny_model)), LONGEST_S)
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert all(talk.messages[0].content.split("\n")[1] == "shop" for talk in talks)
    assert {talk.finish_reason for talk in talks} <= {"TERMINATED", "TRUNCATED", "LENGTH"}


@pytest.mark.nightly  # quick: test_a_model_is_trained_in_a_browser
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SIM != "web", reason="make test-simulators SIM=web runs this")
def test_a_tiny_model_learns_to_shop(fleet, tiny_model):
    spec = yaml.safe_load((EXAMPLES / "shop.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    run = fleet.succeed(fleet.submit(spec), 3000.0)
    rewards = [step.reward_mean for step in fleet.client.metrics(run.id)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
