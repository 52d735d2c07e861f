"""A trainer learns from episodes of pictures and words, over gRPC: it moves the policy toward what was rewarded.

The reward of an action is how near its first number comes to a goal, whatever is seen.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.weights import load_weights
from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.tiny import tiny_fields, write_tiny_robot
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import Episode
from headrace_trainer.learning import step as steps
from headrace_trainer.workloads import run_kind

pytestmark = pytest.mark.timeout(600)
PICTURE, STATE, LENGTH, EPISODES, CHUNKS, GOAL = 48, 3, 2, 8, 6, 0.5
ROWS = EPISODES * CHUNKS
POLICIES = {
    "openvla_oft": ({"state": 0}, "action", 3e-3, 8),
    "pi0": ({"state": STATE}, "chunk", 3e-3, 8),
    "pi05": ({"state": STATE}, "chunk", 3e-3, 8),
}
ADAPTERS = "openvla_oft adapters"
NIGHTLY = {
    "smolvla": ({"state": STATE}, "chunk", 3e-4, 12),
    "act": ({"state": STATE}, "chunk", 3e-5, 12),
}
SELDOM = {"pi05", *NIGHTLY}
LEARNERS = POLICIES | NIGHTLY | {ADAPTERS: ({"state": 0}, "action", 2e-3, 8)}
TRAINER = {ADAPTERS: {"lora": {"rank": 8, "alpha": 32}, "freeze": ["vision"]}}


def seen_of(rng, ids, state, side=PICTURE):
    """What each chunk of each episode sees."""
    pictures = torch.from_numpy(rng.integers(0, 256, (ROWS, side, side, 3), dtype=np.uint8))
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in SELDOM else ()) for name in LEARNERS],
)
async def test_a_policy_that_sees_and_reads_moves_toward_rewarded_actions(
    name, client, robot_config, robots, fetched_weights, settled_digest, tmp_path
):
    given, level, rate, steps = LEARNERS[name]
    kind = name.split()[0]
    directory = tmp_path / "policy"
    fields = tiny_fields(kind, 2, chunk_length=LENGTH, **given)
    if name == ADAPTERS:  # a random head over words, which gets no adapter, could say little
        fields |= {"head": "l1", "log_std": -1.2}
    write_tiny_robot(directory, fields)
    config = robot_config(options={"epochs": 4, "level": level, "value_clip": None, "gamma": 0.01})
    config |= {"model": {"path": str(directory), "dtype": "float32"}, "checkpoint": {"enabled": False}}
    config["optimizer"] |= {"lr": rate}
    config["trainer"] = TRAINER.get(name, {})
    policy = load_policy(directory)
    ids = instruction_encoder(policy.config, str(directory))("push the cube")

    def say(trajectory):
        acted = trajectory.branches[0].segments.pop()
        read = [common_pb2.Segment(tokens={"token_ids": ids})] if ids else []
        trajectory.branches[0].segments.extend([*read, acted])

    version = (await client.open(config)).version
    rng, earned = np.random.default_rng(0), []
    for step in range(steps):
        seen = seen_of(rng, ids, given["state"], fields.get("height", PICTURE))
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


class TwoShares:
    """The rounds of a step whose chunks are divided into two shares, both of which one backend learns."""

    replicas = 2

    def __init__(self, backend):
        self.credit = backend.credit
        self.end_episodes, self.hold, self.end_hold = backend.end_episodes, backend.hold, backend.end_hold
        self.apply, self.backend, self.shares = backend.commit, backend, []

    def read(self, episodes, owners):
        return self.backend.read(episodes, range(len(episodes)))

    def chunks(self, work, lent):
        self.shares += work
        return all(self.backend.learn(*share) for share in zip(work, lent, strict=True))


@pytest.mark.parametrize("kind", POLICIES)
def test_a_minibatch_may_have_fewer_chunks_than_there_are_ranks(
    kind, robot_config, robots, trainer_group, tmp_path
):
    given, level, *_ = POLICIES[kind]
    write_tiny_robot(tmp_path / "policy", tiny_fields(kind, 2, chunk_length=LENGTH, **given))
    fields = robot_config(options={"level": level, "minibatch_size": 1, "value_clip": None})
    config = TrainerConfig.model_validate(
        fields | {"model": {"path": str(tmp_path / "policy"), "dtype": "float32"}}
    )
    run = run_kind(config)
    algorithm = run.check()
    backend = run.backend(algorithm, trainer_group)
    backend.load_initial()
    policy = load_policy(tmp_path / "policy")
    ids = instruction_encoder(policy.config, str(tmp_path / "policy"))("push the cube")
    seen = seen_of(np.random.default_rng(0), ids, given["state"])
    parts, _ = episodes_of(seen, policy.act(seen, range(ROWS)))

    def say(trajectory):
        acted = trajectory.branches[0].segments.pop()
        trajectory.branches[0].segments.extend([common_pb2.Segment(tokens={"token_ids": ids}), acted])

    group = robots.settled(0, parts[:1], common_pb2.PolicyVersion(number=1), change=say)
    rounds = TwoShares(backend)
    learner = run.learner(algorithm, rounds)
    state = steps.restored(steps.StepState(), steps.Version(1, 0, 0), {})
    state, _ = steps.begin(state, steps.Begin(0, 1, 1, 2))
    state = learner.learn(state, [run.read_group(group)])
    assert learner.finish(state, 0.0).finite
    assert sorted(map(len, rounds.shares)) == [0] * CHUNKS + [1] * CHUNKS
