"""A reward model on a real fleet: it holds a device while rollouts generate, and the trainer has it after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.ledger import audit
from harness.processes import run_python
from harness.waiting import wait_for
from headrace.client import HeadraceError

STEPS = 4
# A classifier of the tiny model's size, with its tokenizer and random weights.
WRITE = """
import sys, torch, transformers
from headrace_modelkit.presets.tiny import SHAPE, character_tokenizer

torch.manual_seed(0)
shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
config = transformers.Qwen2Config(**shape, num_labels=1)
transformers.Qwen2ForSequenceClassification(config).save_pretrained(sys.argv[1])
character_tokenizer().save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "classifier"
    run_python("-c", WRITE, directory)
    return directory


def scored(spec_of: Any, classifier: Path, **placement: Any) -> dict[str, Any]:
    spec = spec_of(steps=STEPS, name="scored", evaluation={"every": 2})
    scorer = {"name": "reward_model", "options": {"path": str(classifier)}}
    spec["reward"] = {"scorers": [scorer], "timeout_s": 60}
    return spec | {"placement": placement}


@pytest.mark.nightly  # quick: test_scorer_leases.py, test_reward_model.py
def test_a_reward_model_holds_its_device_and_gives_it_to_the_trainer(fleet, spec_of, classifier):
    run = fleet.submit(scored(spec_of, classifier, rollout="0", reward="1", trainer="0-1"))
    held = wait_for(
        lambda: [each for each in fleet.client.leases().leases if each.stage == "score"], "a lease to score"
    )
    assert held[0].instance == "reward-0" and [name.rpartition("/")[2] for name in held[0].devices] == [
        "cpu:1"
    ]
    run = fleet.succeed(run)
    found = audit(fleet, run)
    assert len(found.live) == STEPS and found.trained and not found.dropped
    rewards = {talk.reward for talk in fleet.client.trajectories(run.id, limit=100)}
    assert len(rewards) > 4, "logits of a classifier, no two answers the same"
    assert not [each for each in fleet.client.leases().leases if each.run == run.id]


def test_devices_that_score_and_generate_at_once_are_refused_with_their_key(fleet, spec_of, classifier):
    with pytest.raises(HeadraceError) as raised:
        fleet.submit(scored(spec_of, classifier, rollout="0-1", reward="1", trainer="0-1"))
    (problem,) = raised.value.problems
    assert problem.key == "placement.reward" and "generates too" in problem.problem
