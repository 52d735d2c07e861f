"""Whole runs of policies that see pictures, with real services: drawn, carried, learned from, judged.

Nightly: the parts are tested for every change (test_rollout_language, test_trainer_episode_pixels,
test_modelkit_tiny_robot).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.environments import pictures
from harness.fleet import Fleet
from harness.ledger import audit
from headrace_modelkit.presets.tiny_robot import tiny_fields, write_tiny_robot

pytestmark = pytest.mark.nightly
BATCH, STEPS, LONGEST = 4, 3, 6
MISMATCH = {"float32": 1e-3, "bfloat16": 0.1}
TASK = f"{pictures.__file__}:make_env"
KINDS: dict[str, dict[str, Any]] = {
    "openvla": {"chunk_length": 1},
    "openvla_oft": {"chunk_length": 2},
    "pi0": {"chunk_length": 2, "state": 1},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with a simulator."""
    with Fleet(tmp_path_factory.mktemp("pixels") / "data", "--simulator", "1", "--trainer", "2") as up:
        yield up


def model(kind: str, directory: Path) -> dict[str, Any]:
    """A new `cnn`, or the directory of a tiny policy that reads."""
    if kind == "cnn":
        return {"policy": {"kind": "cnn", "hidden": [16], "features": 16}}
    write_tiny_robot(directory, tiny_fields(kind, 2, **KINDS[kind]))
    return {"path": str(directory)}


LAYOUT = {
    "ranks": 2,
    "lora": {"rank": 4},
    "freeze": ["vision"],
    "backend_options": {"shard": "weights", "shard_ranks": 2},
}


@pytest.mark.parametrize(
    ("kind", "algorithm", "trainer", "dtype"),
    [
        ("cnn", "ppo", {}, "float32"),
        ("cnn", "ppo", {"ranks": 2}, "float32"),
        ("openvla", "grpo", {}, "float32"),
        ("openvla_oft", "grpo", {}, "float32"),
        ("openvla_oft", "grpo", LAYOUT, "bfloat16"),
        ("pi0", "ppo", {}, "float32"),
        ("pi0", "ppo", LAYOUT, "float32"),
    ],
)
def test_a_policy_that_sees_pictures_is_trained(
    fleet: Fleet, tmp_path: Path, kind: str, algorithm: str, trainer: dict[str, Any], dtype: str
):
    group = 2 if algorithm == "grpo" else 1
    reads = {} if kind == "cnn" else {"cameras": {"image": "front"}, "instructions": {TASK: "push it"}}
    spec = {
        "name": f"pixels-{kind.replace('_', '-')}",
        "workflow": "embodied",
        "steps": STEPS,
        "model": model(kind, tmp_path / "policy") | {"dtype": dtype},
        "trainer": trainer,
        "environment": {"tasks": [TASK], "count": 2, "max_episode_steps": LONGEST, **reads},
        "data": {
            "heldout": 2,
            "options": {"starts": 64},
            "prompt": {"template": "In: What action should the robot take to {question}?\nOut:"},
        },
        "algorithm": {"name": algorithm, "group_size": group, "prompts_per_step": BATCH},
        "optimizer": {"lr": 1.0e-3},
        "export": True,
    }
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH * group
    assert len({item.version.digest for item in found.live}) == STEPS, "every step changed the policy"
    lines = (Path(run.run_directory) / "trajectories.jsonl").read_text().splitlines()
    episodes = [json.loads(json.loads(line)["completion"]) for line in lines]
    assert all(1 <= episode["steps"] <= LONGEST for episode in episodes)
    steps = fleet.client.metrics(run.id)
    assert all(step.figures["log_prob_mismatch_max"] < MISMATCH[dtype] for step in steps), (
        "scored as it was drawn, with the same picture and words"
    )
    assert (Path(run.export_path) / "policy.json").is_file()
    assert (Path(run.export_path) / "tokenizer.json").is_file() == (kind != "cnn")
