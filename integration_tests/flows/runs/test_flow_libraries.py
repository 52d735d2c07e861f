"""Each example of a library's environments on a real fleet, with the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.ledger import audit
from headrace.client import HeadraceError

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
STEPS, GROUPS, SAMPLES = 2, 3, 4
REWARDS = {
    "textarena": {0.0, 0.5, 1.0},
    "reasoning_gym": {0.0, 0.01, 1.0},
    "skyrl_gym": {0.0, 0.1, 1.0},
}


def example(name: str, tiny_model: Path) -> dict[str, Any]:
    """An example's spec with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec["model"] = {"path": str(tiny_model), "dtype": "float32"}
    spec["environment"] |= {"count": 4}
    spec["data"]["heldout"] = 2
    spec["sampling"] |= {"max_new_tokens": 4, "stop": list("\n =+->:,.?acdoprsty")}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    return spec | {"steps": STEPS, "evaluation": {"every": 0}, "export": False}


@pytest.mark.nightly  # quick: test_simulator_libraries.py
@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_model_is_trained_in_a_library_s_environment(fleet, tiny_model, name):
    run = fleet.succeed(fleet.submit(example(name, tiny_model)))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == STEPS * GROUPS * SAMPLES
    assert {round(talk.reward, 2) for talk in talks} <= REWARDS[name]
    turns = {talk.completion.count("assistant: ") for talk in talks}
    assert turns <= {1, 2, 3, 4} and max(turns) > 1
    for certificate in found.live:
        assert certificate.log_prob_mismatch_mean < 1e-3


@pytest.mark.nightly  # quick: test_simulator_libraries.py
def test_a_submission_names_what_a_library_does_not_have(fleet, tiny_model):
    spec = example("textarena", tiny_model)
    for task, words in [
        ("textarena:GuessTheNumbers-v0", "did you mean 'GuessTheNumber-v0'?"),
        ("textarena:SecretMafia-v0", "a game of more than two players"),
    ]:
        spec["environment"] |= {"tasks": [task], "options": {}}
        with pytest.raises(HeadraceError) as caught:
            fleet.submit(spec)
        (problem,) = caught.value.problems
        assert problem.key == "environment.tasks" and words in problem.problem
