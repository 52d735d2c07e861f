"""A robot policy learns to reach unseen goals: it acts, the environment answers, the trainer learns, over gRPC."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_modelkit.weights import load_weights
from headrace_robots.policies.directory import policy_config

PPO = {
    "epochs": 10,
    "minibatch_size": 400,
    "target_kl": 0.03,
    "gamma": 0.97,
    "reward_scale": 0.1,
    "value_clip": None,
}
RECAP = {
    "updates_per_action": 0.31,
    "draws": "recent",
    "learning_starts": 0,
    "critic_hidden": [64, 64],
    "gamma": 0.9,
    "n_step": 1,
}


def success_rate(policy, robots):
    """Of the greedy policy, at any step, with goals that no training seed has."""
    found = robots.play(
        policy, [robots.Reach() for _ in range(48)], range(10**6, 10**6 + 48), 0, deterministic=True
    )
    return np.mean([episode.success for episode in found])


@pytest.mark.parametrize(
    ("name", "options", "policy", "episodes", "steps", "least"),
    [
        ("ppo", PPO, {"chunk_length": 2}, 32, 22, 0.75),
        ("recap", RECAP, {"conditioned": True, "log_std": -0.7, "normalizer": None}, 16, 20, 0.4),
    ],
)
async def test_a_policy_learns_to_reach_unseen_goals(
    name,
    options,
    policy,
    episodes,
    steps,
    least,
    client,
    robot_config,
    robots,
    fetched_weights,
    settled_digest,
):
    config = robot_config(name, options=options, policy=policy)
    version = (await client.open(config | {"checkpoint": {"enabled": False}})).version
    policy = policy_config(config["model"]["policy"]).build(config["seed"])
    before = success_rate(policy, robots)
    for step in range(steps):
        worlds = [robots.Reach() for _ in range(episodes)]
        seeds = range(step * episodes, (step + 1) * episodes)
        played = robots.play(policy, worlds, seeds, step)
        groups = [robots.settled(seed, [each], version) for seed, each in zip(seeds, played, strict=True)]
        await client.begin(step, 1, version.number, version.number + 1)
        await client.learn(step, 1, groups)
        reply = await client.commit(step, 1, version.number, version.number + 1, settled_digest(groups))
        await client.record(step, 1, version.number + 1)
        version = reply.version
        load_weights(policy, await fetched_weights(client, version.number))
    assert before <= 0.2 and success_rate(policy, robots) >= least
    assert reply.figures.get("log_prob_mismatch_max", 0.0) < 1e-4
