"""Steps in which no answer carries loss, since all were cut and cut ones are masked: they commit, and nothing moves."""

from __future__ import annotations

import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import divergence_mask, gae_advantages, reinforce_plus_plus_advantages

ALGORITHMS = {
    "grpo": {},
    "remax": {},
    "reinforce": {"kl_reward_coef": 0.1},
    "rloo": {"kl_reward_coef": 0.1},
    "ppo": {},
    "ppo of groups": {"whiten": False, "bootstrap_truncated": True},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "opo": {},
    "gpg": {},
    "dapo": {"overlong_buffer": 2},
    "kl_cov": {},
    "clip_cov": {},
    "gspo": {"epochs": 2},
}


def cut(group):
    """The group with every answer ended by the length limit."""
    for member in group.members:
        member.trajectory.finish_reason = common_pb2.FINISH_REASON_LENGTH
        member.trajectory.body_digest = trajectory_digest(member.trajectory)
    return group


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_a_step_without_a_trained_token_commits_and_moves_nothing(
    client, make_config, make_settled, settled_digest, fetched_weights, name
):
    algorithm = {"name": name.split()[0], "truncated": "mask", "options": ALGORITHMS[name]}
    version = (await client.open(make_config(algorithm=algorithm))).version
    before = await fetched_weights(client, 1)
    groups = [cut(make_settled(prompt, version=version)) for prompt in range(2)]
    await client.begin(0, 1, 1, 2)
    outcomes = [response.outcomes[0] for response in await client.learn(0, 1, groups)]
    assert {outcome.disposition for outcome in outcomes} == {pb.GROUP_DISPOSITION_ACCUMULATED}
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert (reply.result, reply.token_count) == (pb.COMMIT_RESULT_COMMITTED, 0)
    await client.record(0, 1, 2)
    after = await fetched_weights(client, 2)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_functions_take_rows_without_any_place():
    nothing_BT, mask_BT = torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool)
    assert gae_advantages(torch.ones(3), nothing_BT, mask_BT).returns.shape == (3, 0)
    assert reinforce_plus_plus_advantages(torch.ones(3), mask_BT).advantages.shape == (3, 0)
    assert divergence_mask(nothing_BT, nothing_BT, mask_BT, high=1.0, reduce="max").shape == (3, 0)
