"""Whole runs of policies that see pictures, with real services: drawn, carried, learned from, judged.

Nightly: the parts are tested for every change (test_robots_language, test_robots_episode_pixels,
test_robots_tiny).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.environments import pictures
from harness.fleet import Fleet
from harness.ledger import audit
from headrace.client import load_spec
from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.tiny import tiny_fields, write_tiny_robot
from safetensors.torch import load_file

pytestmark = pytest.mark.nightly
BATCH, STEPS, LONGEST = 4, 3, 6
MISMATCH = {"float32": 1e-3, "bfloat16": 0.1}
PROMPT = "In: What action should the robot take to {question}?\nOut:"
TASK = f"{pictures.__file__}:make_env"
BRING = Path(__file__).resolve().parents[3] / "examples" / "embodied" / "bring.yaml"
LEARNS_S = 900.0
KINDS: dict[str, dict[str, Any]] = {
    "openvla": {"chunk_length": 1},
    "openvla_oft": {"chunk_length": 2},
    "pi0": {"chunk_length": 2, "state": 1},
    "pi05": {"chunk_length": 2, "state": 1},
    "smolvla": {"chunk_length": 2, "state": 1},
    "groot": {"chunk_length": 2, "state": 1},
    "wall": {"chunk_length": 2, "state": 1},
    "act": {"chunk_length": 2, "state": 1},
    "diffusion": {"chunk_length": 2, "state": 1},
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
    sizes = {"height": pictures.SIZE, "width": pictures.SIZE} if kind in ("act", "diffusion") else {}
    write_tiny_robot(directory, tiny_fields(kind, 2, **KINDS[kind]) | sizes)
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
        ("pi05", "ppo", {}, "float32"),
        ("pi05", "grpo", LAYOUT, "bfloat16"),
        ("smolvla", "ppo", {}, "float32"),
        ("smolvla", "grpo", LAYOUT, "bfloat16"),
        ("groot", "ppo", {}, "float32"),
        ("groot", "grpo", LAYOUT, "bfloat16"),
        ("wall", "ppo", {}, "float32"),
        ("wall", "grpo", LAYOUT, "bfloat16"),
        ("act", "ppo", {}, "float32"),
        ("diffusion", "ppo", {}, "float32"),
        ("diffusion", "grpo", LAYOUT, "bfloat16"),
    ],
)
def test_a_policy_that_sees_pictures_is_trained(
    fleet: Fleet, tmp_path: Path, kind: str, algorithm: str, trainer: dict[str, Any], dtype: str
):
    group = 2 if algorithm == "grpo" else 1
    cameras = {"cameras": {"image": "front"}}
    reads = {"cnn": {}, "act": cameras, "diffusion": cameras}.get(
        kind, cameras | {"instructions": {TASK: "push it"}}
    )
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
            "prompt": {"template": PROMPT},
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
    assert (Path(run.export_path) / "tokenizer.json").is_file() == (kind not in ("cnn", "act", "diffusion"))


@pytest.mark.timeout(LEARNS_S)
def test_ppo_learns_from_pictures_alone(fleet: Fleet):
    """The example as it is: its policy begins with random weights, and sees ball and mark in pictures alone."""
    run = fleet.succeed(fleet.submit(load_spec(BRING)), LEARNS_S)
    before, *_, after = (view.score for view in run.evaluations)
    assert before < 0.1 and after > 0.4, "0.58 to 0.86 of seeds 0 to 2, of 64 starts"


def right(directory: Path, seed: int) -> float:
    """The share of first numbers that push the square right, of what a policy draws on 32 pictures."""
    policy = load_policy(directory)
    ids = instruction_encoder(policy.config, str(directory))(PROMPT.format(question="push it"))
    environment, seen = pictures.make_env(), []
    for start in range(32):
        seen.append(environment.reset(seed=start)[0]["front"])
    shown = torch.from_numpy(np.stack(seen))
    chunk = policy.act(
        Observation(None, {"image": shown}, (ids,) * len(shown)), range(seed, seed + len(shown))
    )
    return float((chunk.executed_BCA[..., 0] > 0).float().mean())


def test_adapters_of_a_tiny_oft_move_toward_rewarded_actions(fleet: Fleet, tmp_path: Path):
    """What pushes the square right is rewarded, by an environment that the rollout acts in."""
    fields = tiny_fields("openvla_oft", 2, chunk_length=2) | {"head": "l1", "log_std": -1.0}
    write_tiny_robot(tmp_path / "policy", fields)
    spec = {
        "name": "oft-adapters-learn",
        "workflow": "embodied",
        "steps": 12,
        "model": {"path": str(tmp_path / "policy"), "dtype": "float32"},
        "trainer": {"lora": {"rank": 8, "alpha": 32}, "freeze": ["vision"]},
        "environment": {
            "tasks": [TASK],
            "count": 4,
            "max_episode_steps": LONGEST,
            "cameras": {"image": "front"},
            "instructions": {TASK: "push it"},
        },
        "data": {"options": {"starts": 64}, "prompt": {"template": PROMPT}},
        "algorithm": {
            "name": "ppo",
            "group_size": 1,
            "prompts_per_step": 16,
            "options": {"epochs": 4, "level": "action", "value_clip": None, "gamma": 0.5},
        },
        "optimizer": {"lr": 2.0e-3, "grad_clip": 0.5},
        "export": True,
    }
    run = fleet.succeed(fleet.submit(spec))
    before, after = (right(Path(place), 100) for place in (tmp_path / "policy", run.export_path))
    assert after > max(0.8, before + 0.15), (before, after)
    rewards = [step.figures["reward_mean"] for step in fleet.client.metrics(run.id)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
    changed = changed_weights(tmp_path / "policy", Path(run.export_path))
    assert changed and not any(name.startswith("vision_backbone.") for name in changed), "frozen parts stay"
    assert (Path(run.export_path) / "adapter" / "adapter_model.safetensors").is_file()


def changed_weights(before: Path, after: Path) -> set[str]:
    """Names of the weights that differ."""
    one, other = (load_file(place / "model.safetensors") for place in (before, after))
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
