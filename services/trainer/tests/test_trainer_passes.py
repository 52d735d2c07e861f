"""Several passes over a step's answers make one version."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.trainer.v1 import trainer_pb2 as pb

pytestmark = pytest.mark.timeout(90)

PASSES = {"options": {"epochs": 2, "minibatches": 2}}


async def test_several_passes_are_one_version_and_clip(client, make_config, make_settled, settled_digest):
    """With a clip of nothing every ratio but 1 is clipped: the policy moves between the optimizer steps."""
    options = PASSES["options"] | {"clip_low": 0.0, "clip_high": 0.0}
    config = make_config(algorithm={"options": options}, optimizer={"lr": 1e-2})
    version = (await client.open(config)).version
    groups = [make_settled(prompt, version=version) for prompt in range(3)]
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED and reply.version.ordinal == 1
    tokens = sum(
        len(m.trajectory.branches[0].segments[1].tokens.token_ids) for g in groups for m in g.members
    )
    assert reply.token_count == tokens == reply.figures["log_prob_compared_tokens"]
    assert reply.figures["optimizer_steps"] == 4
    assert 0.1 < reply.figures["clip_fraction"] < 1 and reply.figures["approx_kl"] > 0
    assert 0 < reply.figures["entropy"] <= np.log(32) + 1e-3
    assert await client.commit(0, 1, 1, 2, settled_digest(groups)) == reply


async def test_a_gradient_that_is_not_finite_in_any_pass_leaves_the_base(
    client, make_config, make_settled, settled_digest
):
    """Its replay quarantines the culprits, and then learns what a trainer learns that never saw them."""
    options = PASSES["options"] | {"normalize_std": False}
    config = make_config(algorithm={"options": options}, deterministic=True)
    version = (await client.open(config)).version
    healthy = [make_settled(prompt, version=version) for prompt in (0, 2, 4)]
    culprit = make_settled(3, version=version, rewards=[1e25, 0, 0, 0])
    groups = sorted([*healthy, culprit], key=lambda group: group.prompt_ordinal)
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_NONFINITE
    assert (await client.publish(1)).manifest.digest == version.digest

    await client.begin(0, 2, 1, 3)
    responses = await client.learn(0, 2, groups)
    outcomes = {o.prompt_ordinal: o for response in responses for o in response.outcomes}
    assert outcomes[3].disposition == pb.GROUP_DISPOSITION_NONFINITE and "gradient" in outcomes[3].detail
    replayed = await client.commit(0, 2, 1, 3, settled_digest(healthy))
    assert replayed.result == pb.COMMIT_RESULT_COMMITTED and replayed.group_count == 3

    other = await client.reopen_with(config)
    fresh = [make_settled(prompt, version=other) for prompt in (0, 2, 4)]
    await client.begin(0, 1, other.number, other.number + 1)
    await client.learn(0, 1, fresh)
    clean = await client.commit(0, 1, other.number, other.number + 1, settled_digest(fresh))
    assert clean.version.digest == replayed.version.digest


async def test_a_resumed_run_makes_the_same_passes(client, make_config):
    config = make_config(deterministic=True, algorithm=PASSES)
    version = await client.train((await client.open(config)).version, 1)
    saved = await client.save(version.number)
    straight = await client.train(version, 1)
    await client.close_run()
    resumed = await client.open(config, checkpoint=saved.checkpoint.name, number=50)
    assert (await client.train(resumed.version, 1)).digest == straight.digest
