"""A policy that reads an instruction: its ids are made once, reach the policy, and travel with the episode."""

from __future__ import annotations

import json

import pytest
import torch
from episode_rig import run_episodes, starts
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_robots.policies.directory import policy_config, save_policy
from headrace_robots.policies.policy import Observation
from headrace_servicekit.rpc.episodes import ACTIONS, IMAGE, decode_episode
from rollout_calls import HEADER, refused
from simulator_rig import SIMULATOR_HEADER, open_pool

TASK = "robots.py:make_env"
EYE = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "image_size": 28, "patch_size": 14}
OPENVLA = {
    "kind": "openvla",
    "featurizers": [EYE],
    "text": {
        "vocab_size": 364,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    },
    "action_vocabulary": 300,
    "bounds": {"low": [-1.0, -1.0], "high": [1.0, 1.0]},
    "cameras": ["image"],
}


@pytest.fixture
def directory(tmp_path):
    """A policy directory with a tokenizer of single characters."""
    save_policy(policy_config(OPENVLA).build(3), tmp_path / "policy")
    character_tokenizer("abcdefghij: ").save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


async def open_run(rollout, directory, **model):
    section = {"backend": "gymnasium", "tasks": [TASK], "cameras": {"image": "front"}, "state": []}
    config = {"model": {"path": str(directory), **model}, "environment": section, "seed": 7}
    return await rollout.stub.OpenRun(
        rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    )


async def test_an_instruction_reaches_the_policy_and_the_trajectory(
    new_rollout, publish, simulator_address, directory
):
    rollout, policy = await new_rollout(), policy_config(OPENVLA).build(3).eval()
    await open_run(rollout, directory, dtype="float32")
    await rollout.install(publish(policy, 1))
    pool = await open_pool(simulator_address, TASK, count=2, options={"image": 28, "ends_at": 2})
    groups = starts(range(2), task=TASK)
    for group, said in zip(groups, ("abc:", "j d"), strict=True):
        group.prompt.episode.instruction = said
    trajectories = await (await run_episodes(rollout, [pool], groups)).read_all()
    assert pool.header == SIMULATOR_HEADER and len(trajectories) == 2
    for (ordinal, _), said in zip(sorted(trajectories), ("abc:", "j d"), strict=True):
        prompt, acted = trajectories[ordinal, 0].branches[0].segments
        ids = tuple(prompt.tokens.token_ids)
        assert ids == tuple(character_tokenizer("abcdefghij: ").encode(said)) and not prompt.policy_number
        episode = decode_episode(acted.actions)
        seen = Observation(
            images={"image": torch.from_numpy(episode.observation[IMAGE + "image"])},
            prompts=(ids,) * len(episode.valid_TC),
        )
        with torch.no_grad():
            found = policy.evaluate(seen, {ACTIONS: torch.from_numpy(episode.sampled[ACTIONS])})
        torch.testing.assert_close(
            torch.from_numpy(episode.log_probs_TCA), found.log_probs_BCA, atol=1e-4, rtol=1e-4
        )


async def test_a_policy_that_reads_language_needs_its_tokenizer(new_rollout, directory):
    rollout = await new_rollout()
    for file in directory.glob("tokenizer*"):
        file.unlink()
    await refused(open_run(rollout, directory), "MODEL_NOT_READABLE", "holds no tokenizer that can be read")
    await refused(open_run(rollout, "", policy=OPENVLA), "MODEL_NOT_READABLE", "give model.path")
