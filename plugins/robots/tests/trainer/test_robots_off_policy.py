"""A trainer learns off policy, over gRPC: updates, the replay store, checkpoints, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headrace_modelkit.weights import load_weights
from headrace_robots.policies.directory import policy_config

SMALL = {"batch_size": 16, "critic_hidden": [16], "learning_starts": 24, "updates_per_action": 0.25}
HEADS = {
    "sac": {"head": "squashed"},
    "crossq": {"head": "squashed"},
    "td3_bc": {"head": "deterministic"},
    "iql": {},
}


@pytest.fixture
def off_policy(robot_config):
    """The JSON of OpenRun for an algorithm that learns off policy."""

    def make(name="sac", options=(), policy=(), **more):
        own = {"hidden": [16], "activation": "relu", **HEADS.get(name, {}), **dict(policy)}
        optimizer = {"lr": 1e-3, "beta2": 0.999, "grad_clip": 10.0}
        return robot_config(name, options={**SMALL, **dict(options)}, policy=own, optimizer=optimizer, **more)

    return make


@pytest.fixture
def played(robots):
    """Groups of four start states, drawn by the policy that a version is."""

    def run(policy, version, step):
        worlds = [robots.Reach(horizon=12) for _ in range(4)]
        episodes = robots.play(policy, worlds, range(4 * step, 4 * step + 4), step)
        return [robots.settled(4 * step + place, [each], version) for place, each in enumerate(episodes)]

    return run


def new_policy(config):
    return policy_config(config["model"]["policy"]).build(config["seed"])


async def step(client, groups, version, digest_of, number=None):
    number = number or version.number + 1
    await client.begin(version.ordinal, 1, version.number, number)
    await client.learn(version.ordinal, 1, groups)
    reply = await client.commit(version.ordinal, 1, version.number, number, digest_of(groups))
    await client.record(version.ordinal, 1, number)
    return reply


@pytest.mark.parametrize("name", ["sac", "crossq", "td3_bc", "iql"])
async def test_a_step_makes_the_updates_that_are_due_and_publishes_the_policy_alone(
    name, client, off_policy, played, fetched_weights, settled_digest
):
    config = off_policy(name)
    version = (await client.open(config)).version
    policy = new_policy(config)
    first = await fetched_weights(client, version.number)
    made = []
    for number in range(3):
        reply = await step(client, played(policy, version, number), version, settled_digest)
        version = reply.version
        weights = await fetched_weights(client, version.number)
        load_weights(policy, weights)
        made.append(reply.figures.get("replay_updates"))
    # 48 chunks a step, 24 of the run without an update, then one for every fourth.
    assert made == [6.0, 18.0, 30.0]
    assert reply.figures["updates_per_action"] == pytest.approx(0.25)
    assert (reply.figures["replay_chunks"], reply.figures["replay_episodes"]) == (144, 12)
    assert 0 < reply.figures["replay_age_mean"] < 3
    assert np.isfinite(reply.figures["loss"])
    assert not any("target" in key or key.startswith("critics") for key in weights)
    assert not torch.equal(first["actor.0.weight"], weights["actor.0.weight"])
