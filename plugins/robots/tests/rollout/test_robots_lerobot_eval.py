"""An exported policy earns in LeRobot's own evaluation what it earns in Headrace's, episode by episode.

LeRobot runs in an environment of its own (`ci/lerobot.sh`), as `policies/peers/lerobot_eval.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from episode_rig import episode_of, run_episodes, starts
from headrace.rollout.v1 import rollout_pb2
from headrace_robots.convert import convert, deploy
from headrace_robots.policies.directory import load_policy, save_policy
from headrace_robots.policies.published import Wanted
from rollout_calls import HEADER
from simulator_rig import open_pool

ROOT = Path(__file__).resolve().parents[4]
PEER = ROOT / ".envs/lerobot/bin/python"
pytestmark = [
    pytest.mark.nightly,  # quick: test_robots_episodes compares episodes with gymnasium's own
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PEER.exists(), reason="sh ci/lerobot.sh makes .envs/lerobot"),
]
SEEDS, STEPS, SIDE = list(range(100, 108)), 20, 64
PUSH = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Push(gymnasium.Env):
    '''A disc is pushed to a goal; what it is pushed by depends on where it is.'''

    metadata = {"render_fps": 10}
    action_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    task_description = task = "push the disc to the goal"

    def __init__(self, nested=False):
        self.nested = nested
        place, image = spaces.Box(-9.0, 9.0, (4,), np.float32), spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        shown = {"agent_pos": place, **({"pixels": spaces.Dict({"front": image})} if nested else {"front": image})}
        self.observation_space = spaces.Dict(shown)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-1, 1, 2), self.np_random.uniform(-1, 1, 2)
        return self.seen(), {}

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * np.asarray(action, np.float64), -2, 2)
        off = float(np.linalg.norm(self.place - self.goal))
        done = off < 0.9
        return self.seen(), -off, done, False, {"success": done, "is_success": done}

    def seen(self):
        drawn = np.zeros((SIDE, SIDE, 3), np.uint8)
        for channel, (x, y) in enumerate((self.place, self.goal)):
            column, row = (int((each + 2) / 4 * (SIDE - 9)) for each in (x, y))
            drawn[row : row + 8, column : column + 8, channel] = 255
        place = np.concatenate([self.place, self.goal]).astype(np.float32)
        return {"agent_pos": place, **({"pixels": {"front": drawn}} if self.nested else {"front": drawn})}


def make_env():
    return Push()
""".replace("SIDE", str(SIDE))
ASKED = {
    "family": "act",
    "inputs": {"observation.state": ("state", [4]), "observation.images.front": ("visual", [3, SIDE, SIDE])},
    "outputs": {"action": ("action", [2])},
    "normalization": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "statistics": {
        "observation.state": {"mean": [0.0, 0.1, 0.0, -0.1], "std": [0.6, 0.5, 0.6, 0.5]},
        "action": {"mean": [0.2, -0.1], "std": [0.8, 0.9]},
        "observation.images.front": {"mean": [[[0.1]], [[0.1]], [[0.0]]], "std": [[[0.3]], [[0.3]], [[0.2]]]},
    },
    "fields": {
        "chunk_size": 5,
        "n_action_steps": 3,
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 24,
        "n_encoder_layers": 2,
        "n_decoder_layers": 2,
        "latent_dim": 4,
        "n_vae_encoder_layers": 1,
        "pretrained_backbone_weights": None,
    },
    "width": 0.1,
    "seeds": SEEDS,
    "steps": STEPS,
}


def lerobot(folder):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = ROOT / "plugins/robots/tests/policies/peers/lerobot_eval.py"
    done = subprocess.run(
        [PEER, script, folder], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


async def test_an_export_earns_the_same_in_lerobots_evaluation(
    new_rollout, publish, simulator_address, tmp_path
):
    (tmp_path / "push.py").write_text(PUSH)
    (tmp_path / "asked.json").write_text(json.dumps(ASKED))
    lerobot(tmp_path)
    convert(tmp_path / "checkpoint", tmp_path / "policy", Wanted())
    policy, generator = load_policy(tmp_path / "policy"), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    save_policy(policy, tmp_path / "trained")
    deploy(tmp_path / "checkpoint", tmp_path / "trained", tmp_path / "exported", Wanted())
    lerobot(tmp_path)
    wanted = json.loads((tmp_path / "played.json").read_text())

    task = f"{tmp_path / 'push.py'}:make_env"
    section = {"backend": "gymnasium", "tasks": [task], "state": ["agent_pos"], "cameras": {"front": "front"}}
    model = {"path": str(tmp_path / "trained"), "dtype": "float32"}
    rollout = await new_rollout()
    await rollout.stub.OpenRun(
        rollout_pb2.OpenRunRequest(
            header=HEADER, config_json=json.dumps({"model": model, "environment": section, "seed": 7})
        )
    )
    await rollout.install(publish(policy, 1))
    pool = await open_pool(simulator_address, task, max_episode_steps=STEPS)
    call = await run_episodes(
        rollout, [pool], starts(SEEDS, task=task, greedy=True), greedy=True, evaluation=True
    )
    found = await call.read_all()
    said = [json.loads(found[seed, 0].completion_text) for seed in SEEDS]
    assert [each["steps"] for each in said] == wanted["steps"]
    assert [each["success"] for each in said] == wanted["successes"]
    assert [each["return"] for each in said] == pytest.approx(wanted["returns"], abs=1e-3)
    assert len(set(wanted["successes"])) == 2, "some succeed, and some do not"
    assert all(episode_of(found[seed, 0]).valid_TC.shape[1] == 3 for seed in SEEDS), (
        "in chunks of three actions"
    )
