"""Coding tasks on a real fleet and a real engine: proven, learned from, and solved by agents that others wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT
from headrace.client import HeadraceError

pytestmark = pytest.mark.usefixtures("engine", "one_simulator")
EXAMPLES = ROOT / "examples" / "coding"
MINI = ROOT / ".envs" / "mini" / "bin" / "mini"
# Asks the policy once, as any program in the container may, and does what it said.
AGENT = """
import json, os, subprocess, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": os.environ["HEADRACE_INSTRUCTION"]}]}).encode()
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
asked.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
asked.add_header("Content-Type", "application/json")
said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", said], timeout=20)
"""


def make(folder: Path, *options: str) -> Path:
    """The example's tasks."""
    subprocess.run(
        [sys.executable, EXAMPLES / "make_tasks.py", folder, *options], check=True, stdout=subprocess.DEVNULL
    )
    return folder


def prove(tasks: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace_cli", "tasks", "prove", str(tasks), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def lines(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks that one line solves, proven."""
    tasks = make(tmp_path_factory.mktemp("lines") / "tasks", "--one-line")
    for task in sorted(tasks.iterdir())[4:]:
        shutil.rmtree(task)
    ran = prove(tasks)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["proven"]) == 4
    return tasks


def example(name: str, model: Path, tasks: Path, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    spec["model"] = {"path": str(model), "dtype": "float32"}
    spec["data"]["options"]["path"] = spec["environment"]["options"]["path"] = str(tasks)
    return spec | {"export": False, **more}


@pytest.mark.nightly  # quick: the command in a container below, whose rewards are compared with what was said
def test_a_tiny_model_learns_the_line_that_solves_a_task(fleet: Fleet, tiny_model: Path, lines: Path) -> None:
    """Twenty steps of the example, with groups of eight: what it says is run in a container, and judged in another."""
    spec = example("one_line.yaml", tiny_model, lines, evaluation={"every": 0})
    spec["algorithm"]["prompts_per_step"] = 1
    run = fleet.succeed(fleet.submit(spec), timeout_s=1200)
    rewards = [each.reward_mean for each in fleet.client.metrics(run.id)]
    assert len(rewards) == 20 and sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards


def test_a_command_in_the_container_is_trained_through_the_sessions_endpoint(
    fleet: Fleet, tiny_model: Path, lines: Path
) -> None:
    spec = example("mini.yaml", tiny_model, lines, evaluation={"every": 0}, steps=1)
    spec["agent"] = {"command": ["python3", "-c", AGENT], "sampling": "run"}
    spec["environment"]["options"] = {"path": str(lines), "seconds": 60}
    spec["environment"] |= {"count": 4}
    spec["algorithm"] = {"prompts_per_step": 2, "group_size": 4}
    spec["sampling"] = {"max_new_tokens": 1}
    run = fleet.succeed(fleet.submit(spec), timeout_s=300)
    found = audit(fleet, run)
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(found.trained) + len(found.dropped) == 2 * 4
    for talk in talks:
        said = talk.completion.rpartition("assistant: ")[2]
        right = 1.0 if said == "7" else 0.2 if said in "0123456789" and said else 0.0
        assert talk.reward == pytest.approx(right), (said, talk.reward)


@pytest.mark.nightly  # quick: plugins/containers/tests/coding/test_tasks_agents.py, a command on the host
def test_mini_swe_agent_is_trained_as_it_is(fleet: Fleet, tiny_model: Path, lines: Path) -> None:
    if not MINI.exists():
        pytest.skip("there is no .envs/mini: `bash ci/agents.sh` makes it")
    spec = example("mini.yaml", tiny_model, lines, evaluation={"every": 0}, steps=1)
    spec["agent"]["command"][0] = str(MINI)
    spec["environment"] |= {"count": 2, "max_episode_steps": 2}
    spec["algorithm"] = {"prompts_per_step": 1, "group_size": 2, "options": {}}
    spec["sampling"] = {"max_new_tokens": 8}
    run = fleet.succeed(fleet.submit(spec), timeout_s=600)
    talks = fleet.client.trajectories(run.id, limit=100)
    assert talks and all("You can execute bash commands" in talk.completion for talk in talks)


def test_what_cannot_be_learned_from_is_refused_by_its_key(
    fleet: Fleet, tiny_model: Path, lines: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(lines, tasks)
    (tasks / "line-0" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    (tasks / "line-1" / "tests" / "test.sh").unlink()

    def problems(**options: Any) -> dict[str, str]:
        spec = example("one_line.yaml", tiny_model, tasks)
        spec["environment"]["options"] |= options
        with pytest.raises(HeadraceError) as caught:
            fleet.submit(spec)
        return {each.problem: each.fix for each in caught.value.problems if each.key == "data.options.path"}

    found = problems()
    assert set(found) == {
        "line-0: it has changed since it was proven",
        "line-1: there is no tests/test.sh, which judges it",
    }
    ran = prove(tasks)
    assert ran.returncode == 2
    assert {each["task"] for each in json.loads(ran.stdout)["wrong"]} == {"line-0", "line-1"}
    found = problems()
    assert found["line-0: its tests give 1 to an agent that does nothing"].startswith(
        "write tests that fail until"
    )


def test_containers_that_cannot_be_had_are_refused_by_their_key(
    fleet: Fleet, tiny_model: Path, lines: Path
) -> None:
    spec = example("one_line.yaml", tiny_model, lines)
    spec["environment"]["options"]["path"] = str(lines / "nowhere")
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(spec)
    (problem,) = caught.value.problems
    assert problem.key == "environment.options.path" and "give a folder of tasks" in problem.problem
    spec["environment"]["options"] |= {"path": str(lines), "trns": 3}
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(spec)
    assert (
        caught.value.problems[0].key == "environment.options.trns"
        and "turns" in caught.value.problems[0].problem
    )
