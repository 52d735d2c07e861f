"""A trainer learns from episodes of pictures and words, over gRPC: it moves the policy toward what was rewarded.

The reward of an action is how near its first number comes to a goal, whatever is seen.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.presets.tiny_robot import tiny_fields, write_tiny_robot
from headrace_modelkit.robot.directory import load_policy
from headrace_modelkit.robot.language import instruction_encoder
from headrace_modelkit.robot.policy import Observation
from headrace_modelkit.weights import load_weights
from headrace_servicekit.rpc.episodes import Episode

pytestmark = pytest.mark.timeout(600)
PICTURE, STATE, LENGTH, EPISODES, CHUNKS, GOAL = 48, 3, 2, 8, 6, 0.5
ROWS = EPISODES * CHUNKS
POLICIES = {
    "openvla_oft": ({"state": 0}, "action", 3e-3, 8),
    "pi0": ({"state": STATE}, "chunk", 3e-3, 8),
}


def seen_of(rng, ids, state):
    """What each chunk of each episode sees."""
    pictures = torch.from_numpy(rng.integers(0, 256, (ROWS, PICTURE, PICTURE, 3), dtype=np.uint8))
    states = torch.from_numpy(rng.standard_normal((ROWS, STATE)).astype(np.float32)) if state else None
    return Observation(states, {"image": pictures}, (ids,) * ROWS)


def episodes_of(seen, chunk):
    """(episodes, rewards)."""
    rewards = 1 - np.abs(chunk.executed_BCA[..., 0].numpy() - GOAL)
    parts = []
    for first in range(0, ROWS, CHUNKS):
        rows = slice(first, first + CHUNKS)
        observation = {"image/image": seen.images["image"][rows].numpy()}
        if seen.state_BS is not None:
            observation["state"] = seen.state_BS[rows].numpy()
        parts.append(
            Episode(
                observation=observation,
                sampled={name: value[rows].numpy() for name, value in chunk.sampled.items()},
                executed_TCA=chunk.executed_BCA[rows].numpy(),
                valid_TC=np.ones((CHUNKS, LENGTH), np.bool_),
                log_probs_TCA=chunk.log_probs_BCA[rows].numpy(),
                rewards_TC=rewards[rows].astype(np.float32),
                successes_TC=np.zeros((CHUNKS, LENGTH), np.bool_),
                terminated=True,
                truncated=False,
            )
        )
    return parts, rewards


@pytest.mark.parametrize("kind", POLICIES)
async def test_a_policy_that_sees_and_reads_moves_toward_rewarded_actions(
    kind, client, robot_config, robots, fetched_weights, settled_digest, tmp_path
):
    given, level, rate, steps = POLICIES[kind]
    directory = tmp_path / "policy"
    write_tiny_robot(directory, tiny_fields(kind, 2, chunk_length=LENGTH, **given))
    config = robot_config(options={"epochs": 4, "level": level, "value_clip": None, "gamma": 0.01})
    config |= {"model": {"path": str(directory)}, "checkpoint": {"enabled": False}}
    config["optimizer"] |= {"lr": rate}
    policy = load_policy(directory)
    ids = instruction_encoder(policy.config, str(directory))("push the cube")

    def say(trajectory):
        acted = trajectory.segments.pop()
        trajectory.segments.extend([common_pb2.Segment(tokens={"token_ids": ids}), acted])

    version = (await client.open(config)).version
    rng, earned = np.random.default_rng(0), []
    for step in range(steps):
        seen = seen_of(rng, ids, given["state"])
        chunk = policy.act(seen, range(step * ROWS, (step + 1) * ROWS))
        parts, rewards = episodes_of(seen, chunk)
        earned.append(rewards.mean())
        groups = [
            robots.settled(step * EPISODES + place, [part], version, change=say)
            for place, part in enumerate(parts)
        ]
        await client.begin(step, 1, version.number, version.number + 1)
        await client.learn(step, 1, groups)
        reply = await client.commit(step, 1, version.number, version.number + 1, settled_digest(groups))
        await client.record(step, 1, version.number + 1)
        assert reply.figures["log_prob_mismatch_max"] < 1e-3, "what was drawn is scored as it was drawn"
        version = reply.version
        load_weights(policy, await fetched_weights(client, version.number))
    assert np.mean(earned[-3:]) - np.mean(earned[:2]) > 0.1
