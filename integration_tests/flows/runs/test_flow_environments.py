"""Environments behind servers on a real fleet: the examples of OpenEnv and NeMo Gym, and a server that goes away.

The servers are stubs of their wire; the real ones play the same (plugins/environments/tests).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness.ledger import audit
from harness.processes import ROOT, free_port
from harness.waiting import wait_for
from headrace.client import HeadraceError

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLES = ROOT / "examples" / "environments"
STUBS = ROOT / "plugins" / "environments" / "tests" / "servers" / "stubs.py"
STEPS, GROUPS, SAMPLES = 2, 2, 4


@pytest.fixture
def served(request):
    """The address of a stub, and its process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, STUBS, request.param, str(port)])
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url, timeout=5).status_code < 500
        except httpx.TransportError:
            return False

    wait_for(answers, f"the stub {request.param}")
    yield url, process
    process.kill()
    process.wait()


def example(name: str, model: Path, url: str) -> dict[str, Any]:
    """An example's spec with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec["model"] = {"path": str(model), "dtype": "float32"}
    spec["environment"] |= {"count": 2, "tasks": [url]}
    spec["data"] = {"heldout": 0}
    spec["sampling"] = {"temperature": 1.0, "max_new_tokens": 4, "stop": list("\n =+->:,.?acdoprsty")}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    return spec | {"steps": STEPS, "evaluation": {"every": 0}, "export": False}


@pytest.mark.parametrize("served", ["openenv"], indirect=True)
def test_a_model_is_trained_behind_a_server_of_openenv(fleet, tiny_model, served):
    run = fleet.succeed(fleet.submit(example("openenv", tiny_model, served[0])))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert {talk.reward for talk in talks} <= {0.0, 1.0}
    assert all(talk.messages[0].content == "?" for talk in talks)


@pytest.mark.parametrize("served", ["nemo"], indirect=True)
def test_a_model_is_trained_by_what_a_server_of_nemo_gym_verifies(fleet, tiny_model, served, tmp_path):
    rows = tmp_path / "rows.jsonl"
    asked = [{"responses_create_params": {"input": f"{n}="}, "weather": str(n)} for n in range(3)]
    rows.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    spec = example("nemo_gym", tiny_model, served[0])
    spec["environment"]["options"] |= {"path": str(rows), "parser": "json"}
    run = fleet.succeed(fleet.submit(spec))
    assert len(audit(fleet, run).trained) == STEPS * GROUPS * SAMPLES
    for talk in fleet.client.trajectories(run.id, limit=100):
        question, answer = talk.messages[:2]
        assert talk.reward == float(answer.content.strip() == question.content[0])


@pytest.mark.parametrize("served", ["openenv"], indirect=True)
def test_a_server_that_is_gone_ends_the_run_by_its_name(fleet, tiny_model, served):
    url, process = served
    spec = example("openenv", tiny_model, url) | {"steps": 100_000}
    spec["environment"]["options"]["patience_s"] = 0.0
    run = fleet.submit(spec)
    fleet.reach(run, 1)
    process.kill()
    ended = fleet.state(run, "FAILED")
    assert url in ended.reason and "server of OpenEnv" in ended.reason, ended.reason
    for task, words in [(url, "does not answer at"), ("guess", "write http://HOST:PORT")]:
        spec["environment"]["tasks"] = [task]
        with pytest.raises(HeadraceError) as caught:
            fleet.submit(spec)
        (problem,) = caught.value.problems
        assert problem.key == "environment.tasks" and words in problem.problem
