"""The tiny model learns what is rewarded, through the service, with several clipped optimizer steps a version."""

from __future__ import annotations

import pytest
from headrace.trainer.v1 import trainer_pb2 as pb

pytestmark = pytest.mark.timeout(90)
STEPS = 6


async def log_prob(client, trajectory) -> float:
    request = pb.InferRequest().trajectories.add()
    request.CopyFrom(trajectory)
    [found] = (await client.infer([request])).sequences
    return sum(found.values) / len(found.values)


@pytest.mark.parametrize("name", ["dapo", "gspo", "reinforce_pp"])
async def test_rewarded_answers_become_likelier_and_the_others_less(
    client, make_config, make_settled, settled_digest, name
):
    """Old log-probs are the trainer's own, so answers that nobody sampled stand for sampled ones here."""
    options = {"epochs": 2, "minibatches": 2}
    config = make_config(algorithm={"name": name, "options": options}, optimizer={"lr": 3e-3})
    version = (await client.open(config)).version
    good, bad = (make_settled(0, version=version).members[index].trajectory for index in (0, 1))
    before = await log_prob(client, good), await log_prob(client, bad)
    clipped = []
    for step in range(STEPS):
        groups = [make_settled(prompt, version=version, rewards=[1.0, 0.0, 0.0, 0.0]) for prompt in range(3)]
        number = version.number + 1
        await client.begin(step, 1, version.number, number)
        await client.learn(step, 1, groups)
        reply = await client.commit(step, 1, version.number, number, settled_digest(groups))
        await client.record(step, 1, number)
        version = reply.version
        clipped.append(reply.figures["clip_fraction"])
        assert reply.figures["optimizer_steps"] == 4 and reply.figures["entropy"] > 0
    assert max(clipped) > 0
    after = await log_prob(client, good), await log_prob(client, bad)
    assert after[0] - before[0] > 0.3 and after[0] - after[1] > before[0] - before[1] + 0.3
