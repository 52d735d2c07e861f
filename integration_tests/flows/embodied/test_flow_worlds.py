"""A world model with real services: learned from a run's real episodes by the command, learned in by another run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, clean_environment
from harness.waiting import wait_for
from headrace.client import HeadraceError

pytestmark = pytest.mark.usefixtures("one_simulator")
STEPS, LENGTH = 3, 16


def spec(**environment: Any) -> dict[str, Any]:
    """A short run of SAC in the real pendulum, or in an environment that these keys say."""
    return {
        "name": "pendulum",
        "workflow": "embodied",
        "steps": STEPS,
        "model": {"policy": {"kind": "mlp", "head": "squashed", "activation": "relu", "hidden": [16]}},
        "environment": {"tasks": ["Pendulum-v1"], "count": 4, "max_episode_steps": LENGTH, **environment},
        "data": {"heldout": 2, "options": {"starts": 64}},
        "algorithm": {
            "name": "sac",
            "group_size": 1,
            "prompts_per_step": 4,
            "options": {"batch_size": 32, "critic_hidden": [16], "updates_per_action": 0.2},
        },
        "optimizer": {"lr": 1e-3, "beta2": 0.999},
        "evaluation": {"every": STEPS},
        "checkpoint": {"interval_steps": STEPS},
        "export": True,
    }


def test_a_run_learns_in_a_model_of_real_episodes_and_says_which(fleet: Fleet, tmp_path: Path):
    real = fleet.succeed(fleet.submit(spec()))
    (tmp_path / "real.yaml").write_text(yaml.safe_dump(spec()))
    world, store = tmp_path / "worlds" / "pendulum", fleet.data_dir / "runs" / real.id / "replay"
    command = ("world", "train", str(tmp_path / "real.yaml"), str(store), "--output", str(world))
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", *command, "--steps", "300", "--hidden", "32", "--json"],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["number"], told["data"]["episodes"], told["data"]["steps"]) == (1, 12, 12 * LENGTH)
    assert told["errors"]["change"][0] < 1.0
    # Nearly every action is beyond so small a threshold.
    tight = {"backend": "world", "tasks": [str(world)], "vectorized": True, "options": {"threshold": 1e-6}}
    run = fleet.succeed(fleet.submit(spec(**tight)))
    assert len(audit(fleet, run).trained) == STEPS * 4
    (fitted,) = [event.data for event in fleet.events(run) if event.type == "policy_fitted"]
    assert fitted["versions"]["world pendulum"] == told["version"]
    assert fitted["policy"]["state_size"] == 3 and fitted["policy"]["bounds"]["high"] == [2.0]
    figures = [step.figures for step in fleet.client.metrics(run.id)]
    assert {each["cut_early"] for each in figures} == {1.0}, "each episode is cut where the members disagree"
    assert {step.figures["cut_early"] for step in fleet.client.metrics(real.id)} == {0.0}
    suite = {"name": "episodes", "options": {"environment": spec()["environment"], "starts": 4}}
    judged = fleet.client.evaluate({"suite": suite, "checkpoint": {"run": run.id}})
    wait_for(lambda: fleet.client.evaluation(judged.id).ended, "the policy to act in the real one")
    found = fleet.client.evaluation(judged.id)
    assert found.result is not None and found.result.modes[0].score < 0, json.dumps(found.reason)
    assert "gymnasium" in found.versions and "world pendulum" not in found.versions


def test_a_policy_of_other_spaces_is_refused_by_key(fleet: Fleet, tmp_path: Path):
    gone = spec(backend="world", tasks=[str(tmp_path / "worlds" / "pendulum")])
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(gone)
    (problem,) = refused.value.problems
    assert problem.key.startswith("environment.tasks") and "there is no world model" in problem.problem
