"""A committed step says over how many tokens engine and trainer were compared, also where no group has a gradient."""

from __future__ import annotations

import math
from types import SimpleNamespace

import grpc
import pytest
import torch
from headrace.trainer.v1 import trainer_pb2
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer.algorithms._base import LossSums
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.learning.figures import differences
from headrace_trainer.learning.reading import read_sequence
from headrace_trainer.learning.samples import Sample
from trainer_calls import Engine, settled_group

VOCABULARY = 1 << 20


async def committed(client, digest, step, groups):
    """The reply of a step of these groups; the version is that of `client.state()`."""
    base = (await client.state()).version.number
    await client.begin(step, 1, base, base + 1)
    await client.learn(step, 1, groups)
    reply = await client.commit(step, 1, base, base + 1, digest(groups))
    await client.record(step, 1, base + 1)
    return reply


async def test_a_step_of_equal_rewards_is_compared_on_a_few_answers(
    client, make_settled, settled_digest, plain_log_probs
):
    version = (await client.open()).version
    weights = await client.weights(1)
    group = make_settled(0, version=version, rewards=[1.0] * 4)
    figures = (await committed(client, settled_digest, 0, [group])).figures
    sequences = [read_sequence(member.trajectory, SamplingSection(), VOCABULARY) for member in group.members]
    own = torch.tensor([v for row in plain_log_probs(weights, sequences) for v in row])
    engine = torch.tensor([v for s in sequences for v in s.engine_log_probs])
    assert figures["grad_norm"] == 0.0 and figures["log_prob_compared_tokens"] == len(own)
    assert figures["log_prob_mismatch_mean"] == pytest.approx(float((own - engine).abs().mean()), abs=1e-4)
    assert figures["log_prob_mismatch_max"] == pytest.approx(float((own - engine).abs().max()), abs=1e-4)
    ratio = (own - engine).exp()
    assert figures["log_prob_mismatch_kl"] == pytest.approx(
        float((ratio - 1 - (own - engine)).mean()), rel=1e-3, abs=1e-6
    )
    assert figures["log_prob_ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-3)
    assert figures["log_prob_ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-3)


async def test_a_commit_says_what_the_new_version_makes_of_rated_tokens(
    client, make_settled, settled_digest, plain_log_probs
):
    version = (await client.open()).version
    groups = [make_settled(0, version=version), make_settled(1, version=version)]
    groups[1].rated = True
    before = await client.weights(1)
    reply = await committed(client, settled_digest, 0, groups)
    assert [(each.sample.prompt_ordinal, each.sample.sample_index) for each in reply.rated] == [
        (1, number) for number in range(4)
    ]
    after = await client.weights(2)
    sequences = [read_sequence(each.trajectory, SamplingSection(), VOCABULARY) for each in groups[1].members]
    for found, own, old in zip(
        reply.rated, plain_log_probs(after, sequences), plain_log_probs(before, sequences), strict=True
    ):
        assert list(found.log_probs) == pytest.approx(own, abs=2e-2), (
            "bfloat16 publishes what float32 computes"
        )
        assert len(found.log_probs) == len(old)
    assert any(
        abs(a - b) > 1e-6
        for found, old in zip(reply.rated, plain_log_probs(before, sequences), strict=True)
        for a, b in zip(found.log_probs, old, strict=True)
    )


def settled(make_settled, version, change):
    """A group whose first sampled segment is changed, digest and all."""
    group = make_settled(0, version=version)
    trajectory = group.members[2].trajectory
    change(trajectory.branches[0].segments[1].tokens)
    trajectory.body_digest = trajectory_digest(trajectory)
    return group


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.2)]
)
async def test_answers_of_a_cut_or_changed_distribution_are_refused(client, make_settled, name, value):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    group = settled(make_settled, version, lambda tokens: setattr(tokens.distribution, name, value))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.learn(0, 1, [group])
    assert reason_of(caught.value) == "INVALID"
    assert name in caught.value.details() and "sample 2 of prompt 0" in caught.value.details()


async def test_a_segment_of_another_temperature_is_learned_from_at_its_own(
    client, make_settled, settled_digest, plain_log_probs
):
    version = (await client.open()).version
    weights = await client.weights(1)
    group = settled(make_settled, version, lambda tokens: setattr(tokens.distribution, "temperature", 0.5))
    read = [read_sequence(each.trajectory, SamplingSection(), VOCABULARY) for each in group.members]
    assert [{*each.temperatures} for each in read] == [set(), set(), {0.5}, set()]
    # A trainer that took the run's temperature would report another distance to the engine.
    figures = (await committed(client, settled_digest, 0, [group])).figures
    own = plain_log_probs(weights, read, temperatures=True)
    off = [
        abs(a - b)
        for one, s in zip(own, read, strict=True)
        for a, b in zip(one, s.engine_log_probs, strict=True)
    ]
    assert figures["log_prob_mismatch_mean"] == pytest.approx(sum(off) / len(off), abs=1e-4)


async def test_what_was_not_drawn_by_chance_is_refused(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    group = settled(make_settled, version, lambda tokens: setattr(tokens.distribution, "temperature", 0.0))
    with pytest.raises(grpc.aio.AioRpcError, match="not drawn by chance"):
        await client.learn(0, 1, [group])


async def test_a_masked_answer_may_be_of_any_distribution(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    group = settled(make_settled, version, lambda tokens: setattr(tokens.distribution, "temperature", 0.0))
    group.members[2].masked = True
    [response] = await client.learn(0, 1, [group])
    assert response.outcomes[0].disposition == trainer_pb2.GROUP_DISPOSITION_ACCUMULATED


async def test_a_log_prob_that_is_not_a_number_is_refused(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.learn(0, 1, [settled(make_settled, version, tell_nan)])
    assert reason_of(caught.value) == "INVALID"
    assert "NaN" in caught.value.details() and "sample 2 of prompt 0" in caught.value.details()
    # Values that were never told are no error.
    group = settled(make_settled, version, lambda tokens: tokens.ClearField("log_probs"))
    [response] = await client.learn(0, 1, [group])
    assert response.outcomes[0].disposition == trainer_pb2.GROUP_DISPOSITION_ACCUMULATED


def tell_nan(tokens) -> None:
    """The engine's first log-prob is NaN."""
    tokens.log_probs[0] = float("nan")


async def test_a_step_with_a_gradient_counts_the_tokens_of_its_micro_batches(
    client, make_settled, settled_digest
):
    version = (await client.open()).version
    learned = make_settled(0, version=version)
    equal = make_settled(1, version=version, rewards=[1.0] * 4)
    figures = (await committed(client, settled_digest, 0, [equal, learned])).figures
    tokens = sum(len(m.trajectory.branches[0].segments[1].tokens.token_ids) for m in learned.members)
    assert figures["log_prob_compared_tokens"] == tokens


async def test_a_step_without_log_probs_of_the_engine_says_that_nothing_was_compared(
    client, make_settled, settled_digest
):
    version = (await client.open()).version
    for step, rewards in enumerate([None, [1.0] * 4]):
        group = make_settled(step, version=version, rewards=rewards)
        for member in group.members:
            member.trajectory.branches[0].segments[1].tokens.ClearField("log_probs")
            member.trajectory.body_digest = trajectory_digest(member.trajectory)
        reply = await committed(client, settled_digest, step, [group])
        version = reply.version
        assert reply.figures["log_prob_compared_tokens"] == 0
        assert "log_prob_mismatch_mean" not in reply.figures


def test_ratios_of_engine_and_trainer_add_up_over_micro_batches():
    """Tokens without an engine's log-prob are left out, and one that is far off makes no sum infinite."""
    nan, engine = float("nan"), torch.tensor([-1.0, -2.0, float("nan"), -0.5, -900.0])
    old = torch.tensor([-1.5, -1.0, -3.0, -0.5, 0.0])
    whole, halves = TokenFigures(), TokenFigures()
    for figures, parts in ((whole, [slice(0, 5)]), (halves, [slice(0, 2), slice(2, 5)])):
        for part in parts:
            batch = SimpleNamespace(
                log_probs_K=old[part], old_log_probs_K=old[part], engine_log_probs_K=engine[part]
            )
            added = TokenFigures()
            added.add(LossSums(torch.tensor(0.0), {}), batch)
            figures.merge(added)
    ratio = torch.tensor([-0.5, 1.0, 0.0, 20.0], dtype=torch.float64).exp()
    sums = whole.sums()
    assert sums == pytest.approx(halves.sums()) and whole.maxima() == halves.maxima()
    assert sums["engine_tokens"] == 4 and nan not in sums.values()
    assert sums["ratio"] == pytest.approx(float(ratio.sum()))
    assert sums["ratio_square"] == pytest.approx(float(ratio.square().sum()))
    assert sums["mismatch"] == pytest.approx(901.5)


async def test_a_deterministic_step_is_refused_by_the_first_token_that_differs(
    client, make_config, settled_digest
):
    version = (await client.open(make_config(deterministic=True))).version
    Engine.tells = True
    groups = [settled_group(prompt, version=version) for prompt in (3, 5)]
    await client.begin(0, 1, 1, 2)
    await client.learn(0, 1, groups)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reason_of(caught.value) == "LOG_PROBS_DIFFER"
    told = groups[0].members[0].trajectory.branches[0].segments[1].tokens
    assert (
        f"differ in step 1, slot (prompt 3, sample 0), token 0 (id {told.token_ids[0]}): the engine's log-prob is "
        f"{told.log_probs[0]:.9g} (0x" in caught.value.details()
    )


def test_one_bit_is_a_difference_and_a_token_that_the_engine_tells_nothing_of_is_none():
    near = float(torch.nextafter(torch.tensor(-1.25), torch.tensor(0.0)))
    sample = Sample([7, 8, 9, 9], [1, 2, 3], [-0.5, -1.25, math.nan], slot=(4, 1))
    assert not list(differences([sample], [[-0.5, -1.25, -3.0]]))
    (found,) = differences([sample], [[-0.5, near, -3.0]])
    assert (found.slot, found.place, found.token) == ((4, 1), 1, 9)
    assert "-1.25 (0xbfa00000), the trainer's -1.24999988 (0xbf9fffff)" in str(found)
    figures = TokenFigures()
    engine_K = torch.tensor(sample.engine_log_probs)
    tokens = SimpleNamespace(engine_log_probs_K=engine_K, old_log_probs_K=torch.tensor([-0.5, near, -3.0]))
    figures.compare_bits(tokens, [[sample]])
    assert figures.sums()["mismatch_bits"] == 22 and figures.differs == [found]
