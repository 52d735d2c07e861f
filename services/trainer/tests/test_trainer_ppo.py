"""PPO: advantages and losses against the functions, and a run of it by a real trainer service, saved and resumed."""

from __future__ import annotations

from dataclasses import replace

import grpc
import msgspec
import pytest
import torch
from algorithm_losses import ppo_loss, value_loss
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_modelkit.presets.tiny import CHARACTERS, character_tokenizer, save_model, tiny_model
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer.algorithms import build_algorithm, gae_advantages
from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    VALUES,
    Barrier,
    Outcomes,
    TokenBatch,
)
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.intake import Intake
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.passes import OptimizerStep, step_rates
from headrace_trainer.learning.planning import Costs
from safetensors.torch import load_file

PASSES = {"epochs": 2, "minibatches": 2}
LENGTHS = [3, 0, 5, 4, 2, 1]


def build(**options):
    return build_algorithm(AlgorithmSection(name="ppo", options=options))


def config_of(make_config, kind="head", **sections):
    options = {**PASSES, "critic": kind, "lam": 0.95, "critic_lr": 1e-2}
    return make_config(algorithm={"name": "ppo", "options": options}, **sections)


@pytest.fixture
def outcomes():
    mask_BT = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    values_BT = torch.randn(6, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return Outcomes(
        rewards_B=torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25], dtype=torch.float64),
        groups_B=torch.arange(6),
        mask_BT=mask_BT,
        lengths_B=torch.tensor([3, 4, 5, 4, 2, 1]),
        longest=5,
        columns_BT={VALUES: values_BT * mask_BT},
    )


@pytest.mark.parametrize("whiten", [True, False])
def test_advantages_and_returns_are_gae_s(outcomes, whiten):
    algorithm = build(gamma=0.9, lam=0.8, whiten=whiten)
    assert algorithm.barrier is (Barrier.BATCH if whiten else Barrier.GROUP)
    values_BT, mask_BT = outcomes.columns_BT[VALUES], outcomes.mask_BT
    found = algorithm.advantages(outcomes)
    given = {"gamma": 0.9, "lam": 0.8, "whiten_advantages": whiten}
    torch.testing.assert_close(found, gae_advantages(outcomes.rewards_B, values_BT, mask_BT, **given))
    cut = replace(outcomes, bootstrap_values_B=torch.tensor([0.0, 0, 2, 0, 0, 0], dtype=torch.float64))
    expected = gae_advantages(
        outcomes.rewards_B, values_BT, mask_BT, bootstrap_values_B=cut.bootstrap_values_B, **given
    )
    torch.testing.assert_close(algorithm.advantages(cut), expected)


def test_kl_rewards_are_every_token_s(outcomes):
    algorithm = build(kl_reward_coef=0.1, kl_estimator="k1", gamma=0.9, lam=0.8)
    assert set(algorithm.columns) == {VALUES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS}
    mask_BT = outcomes.mask_BT.double()
    columns_BT = {OLD_LOG_PROBS: -1.0 * mask_BT, REFERENCE_LOG_PROBS: -3.0 * mask_BT, **outcomes.columns_BT}
    rewards_BT = -0.2 * mask_BT
    for row, length in enumerate(LENGTHS):
        if length:
            rewards_BT[row, length - 1] += outcomes.rewards_B[row]
    found = algorithm.advantages(replace(outcomes, columns_BT=columns_BT))
    expected = gae_advantages(
        rewards_BT, columns_BT[VALUES], mask_BT, gamma=0.9, lam=0.8, whiten_advantages=True
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_step_streamed_in_micro_batches_is_both_functions_loss_of_the_batch(outcomes, aggregation):
    algorithm = build(
        **PASSES, value_coefficient=0.7, value_clip=0.3, value_huber=0.5, loss_aggregation=aggregation
    )
    generator = torch.Generator().manual_seed(3)
    mask_BT = outcomes.mask_BT
    log_probs_BT = (-torch.rand(6, 5, generator=generator)).requires_grad_()
    values_BT = torch.randn(6, 5, generator=generator).requires_grad_()
    old_BT = log_probs_BT.detach() + 0.3 * torch.randn(6, 5, generator=generator)
    old_values_BT = outcomes.columns_BT[VALUES].float()
    advantages_BT, returns_BT = (each.float() for each in algorithm.advantages(outcomes))
    total = torch.zeros(())
    for rows in ([0, 2], [3], [4, 5]):
        flat, lengths = mask_BT[rows], [LENGTHS[row] for row in rows]
        batch = TokenBatch(
            log_probs_K=log_probs_BT[rows][flat],
            old_log_probs_K=old_BT[rows][flat],
            engine_log_probs_K=old_BT[rows][flat],
            advantages_K=advantages_BT[rows][flat],
            weights_K=torch.tensor([algorithm.token_weight(n) for n in lengths for _ in range(n)]),
            sequences_K=torch.repeat_interleave(torch.tensor(lengths)),
            columns_K={VALUES: old_values_BT[rows][flat], RETURNS: returns_BT[rows][flat]},
            values_K=values_BT[rows][flat],
        )
        total = total + algorithm.loss(batch).loss
    total = total / algorithm.denominator(sum(LENGTHS), sum(1 for n in LENGTHS if n))
    total.backward()
    plain_BT, plain_values_BT = (x.detach().clone().requires_grad_() for x in (log_probs_BT, values_BT))
    policy = ppo_loss(plain_BT, old_BT, advantages_BT, mask_BT, aggregation=aggregation).loss
    critic = value_loss(
        plain_values_BT,
        old_values_BT,
        returns_BT,
        mask_BT,
        clip=0.3,
        huber_delta=0.5,
        aggregation=aggregation,
    ).loss
    (policy + 0.7 * critic).backward()
    torch.testing.assert_close(total, policy + 0.7 * critic)
    torch.testing.assert_close(log_probs_BT.grad, plain_BT.grad)
    torch.testing.assert_close(values_BT.grad, plain_values_BT.grad)


class ValuedRounds:
    """A trainer group whose critic says how many tokens it has read."""

    shares_prefixes, replicas = True, 1
    costs, micro_batch_tokens = Costs(), 512

    def __init__(self):
        self.work, self.asked = [], []

    def micro(self, work):
        self.work += [s for each in work for rows in each for row in rows for s in row]
        return [True] * len(work)

    def holds(self):
        return True

    def infer(self, groups, columns):
        self.asked.append(tuple(columns))
        return [
            [{name: [float(p) for p in s.trained] for name in columns} for s in group] for group in groups
        ]

    def apply(self, denominator, rate, critic_rate):
        return CommitReport(True, 1.0, {"tokens": 1.0, "loss": 1.0}, {})

    def hold(self):
        pass

    def end_hold(self, *, back):
        pass


@pytest.mark.parametrize(("options", "kind"), [(PASSES, BatchLearner), ({"whiten": False}, Learner)])
@pytest.mark.parametrize("bootstraps", [True, False])
def test_values_of_the_base_and_of_cut_ends_reach_the_returns(
    make_config, make_group, options, kind, bootstraps
):
    """Also where groups are learned from as they come; a masked answer has neither values nor returns."""
    chosen = {**options, "gamma": 0.5, "lam": 0.0, "bootstrap_truncated": bootstraps}
    config = TrainerConfig.model_validate(make_config(algorithm={"name": "ppo", "options": chosen}))
    rounds = ValuedRounds()
    learner = kind(config, build_algorithm(config.algorithm), rounds)
    state = steps.restored(steps.StepState(), steps.Version(5, 1, 1), {1: 0})
    state = steps.begin(state, steps.Begin(1, 1, 5, 6))[0]
    group = make_group(0, version=5)
    first, second, *rest = group.members
    cut = replace(first, truncated=True, samples=(msgspec.structs.replace(first.samples[0], cut=True),))
    group = replace(group, members=(cut, replace(second, masked=True), *rest))
    finished = learner.finish(learner.learn(state, [group]), 1e-3)
    assert finished.finite and len(rounds.asked) == 1, "the infer pass runs once"
    assert {len(s.tokens) for s in rounds.work} <= {m.size for m in group.members}
    assert len(rounds.work) == 3 * (2 if options is PASSES else 1)
    for index, sequence in zip((0, 2, 3), rounds.work, strict=False):
        member = next(m for m in group.members if m.samples[0].tokens == sequence.tokens)
        following = member.size if bootstraps and member.truncated else 0.0
        values = [float(position) for position in member.samples[0].trained]
        assert sequence.columns[VALUES] == values, index
        # With lambda 0 a return is the reward and half of the next value.
        expected = [0.5 * value for value in values[1:]] + [member.reward + 0.5 * following]
        assert sequence.columns[RETURNS] == pytest.approx(expected)
        assert len(sequence.advantages) == member.sampled


def test_the_share_of_the_returns_that_values_explain_is_a_figure(make_group):
    returns, values = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.5, 2.0, 2.0, 5.0])
    errors = returns - values
    sums = {
        "tokens": 4.0,
        "entropy": 4.0,
        "loss": 1.0,
        "engine_tokens": 0.0,
        "own.value_mean": float(values.sum()),
        "own.return_mean": float(returns.sum()),
        "own.return_square": float(returns.square().sum()),
        "own.value_error": float(errors.sum()),
        "own.value_error_square": float(errors.square().sum()),
    }
    done = [OptimizerStep(CommitReport(True, 1.0, sums, {}, critic_grad_norm=2.0), 4.0)]
    state = steps.begin(
        steps.restored(steps.StepState(), steps.Version(5, 1, 1), {1: 0}), steps.Begin(1, 1, 5, 6)
    )[0]
    config = TrainerConfig.model_validate({"model": {"path": "none"}, "steps": 1, "seed": 0})
    record = Intake(config, build()).record(state, make_group(0, version=5))
    figures = step_figures(done, [record], rate=1e-3)
    expected = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert figures["explained_variance"] == pytest.approx(float(expected), rel=1e-5)
    assert (figures["value_mean"], figures["return_mean"], figures["critic_grad_norm"]) == (2.625, 3.0, 2.0)
    assert not {"return_square", "value_error", "value_error_square"} & figures.keys()


def test_the_critic_s_rate_follows_the_schedule_and_it_learns_alone_at_first(make_config):
    config = TrainerConfig.model_validate(
        make_config(optimizer={"lr": 1e-3, "schedule": {"name": "linear", "total_steps": 4}})
    ).optimizer
    plan = build(critic_lr=1e-2, critic_warmup_steps=2).critic
    rates = [step_rates(config, plan, step, 10) for step in range(4)]
    assert rates == [pytest.approx(r) for r in ((0, 1e-2), (0, 7.5e-3), (5e-4, 5e-3), (2.5e-4, 2.5e-3))]
    assert step_rates(config, None, 0, 10) == (1e-3, 0.0)
    assert step_rates(config, build().critic, 0, 10) == (1e-3, 1e-3)


def optimizer_file(client, saved):
    return load_file(client.directory / "checkpoints" / saved.checkpoint.name / "optimizer.safetensors")


@pytest.mark.parametrize("kind", ["head", "model"])
async def test_a_run_learns_saves_and_resumes_with_its_critic(client, make_config, kind):
    config = config_of(make_config, kind, deterministic=True)
    restored = (await client.open(config)).version
    published = (await client.publish(restored.number)).manifest
    assert published.entries and not any("critic" in entry.name for entry in published.entries)
    version = await client.train(restored, 2)
    saved = await client.save(version.number)
    straight = await client.train(version, 2)
    files = [optimizer_file(client, await client.save(straight.number))]
    await client.close_run()

    resumed = await client.open(config, checkpoint=saved.checkpoint.name, number=50)
    assert resumed.version.digest == version.digest
    again = await client.train(resumed.version, 2)
    assert again.digest == straight.digest
    files.append(optimizer_file(client, await client.save(again.number)))
    critic = {name for name in files[0] if name.startswith("critic/")}
    assert {"critic/critic.head.weight", "critic/critic.head.bias"} <= critic
    assert (len(critic) > 2) is (kind == "model")
    assert files[0]["critic/critic.head.weight"].any()
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


async def test_the_figures_of_a_step_tell_how_the_critic_does(
    client, make_config, make_settled, settled_digest
):
    version = (await client.open(config_of(make_config))).version
    seen = []
    for step in range(12):
        # The same prompts: a critic can learn what they are worth.
        groups = [make_settled(p, version=version, rewards=[float(p == 0)] * 4) for p in range(3)]
        await client.begin(step, 1, version.number, version.number + 1)
        await client.learn(step, 1, groups)
        reply = await client.commit(step, 1, version.number, version.number + 1, settled_digest(groups))
        assert reply.result == pb.COMMIT_RESULT_COMMITTED
        await client.record(step, 1, reply.version.number)
        seen.append(dict(reply.figures))
        version = reply.version
    names = {"value_loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance"}
    assert names | {"infer_seconds", "critic_grad_norm", "clip_fraction"} <= seen[0].keys()
    assert seen[0]["value_mean"] == 0 and seen[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < seen[0]["infer_seconds"] < seen[0]["learn_seconds"]
    assert seen[-1]["explained_variance"] > 0.3 and seen[-1]["value_loss"] < seen[0]["value_loss"]
    answers = [group.members[0].trajectory for group in groups]
    values = [list(each.values) for each in (await client.infer(answers, pb.INFER_KIND_VALUES)).sequences]
    assert sum(values[0]) / len(values[0]) > sum(values[1]) / len(values[1]), (
        "the one that is worth something"
    )
    assert seen[0]["groups_all_equal"] == 3 and seen[0]["grad_norm"] > 0, "equal rewards teach a critic too"


async def test_critics_that_do_not_fit_are_refused_by_name(client, make_config, tmp_path):
    async def message(config, **opened) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.open(config, **opened)
        return reason_of(caught.value), caught.value.details()

    plain = make_config()
    reason, text = await message(make_config(algorithm={"options": {"critic": "head"}}))
    assert reason == "INVALID" and "algorithm.options.critic" in text
    save_model(
        tiny_model(vocab_size=len(CHARACTERS) + 4), character_tokenizer(CHARACTERS + "z"), tmp_path / "z"
    )
    options = {**PASSES, "critic": "model", "critic_path": str(tmp_path / "z")}
    reason, text = await message(make_config(algorithm={"name": "ppo", "options": options}))
    assert reason == "MODEL_NOT_READABLE" and text.startswith("algorithm.options.critic_path: ")

    without = (
        await client.save((await client.train((await client.open(plain)).version, 1)).number)
    ).checkpoint
    await client.close_run()
    reason, text = await message(config_of(make_config), checkpoint=without.name, number=20)
    assert (
        reason == "CHECKPOINT_MISMATCH" and "algorithm.options.critic: the checkpoint has no critic" in text
    )
    await client.close_run()

    version = (await client.open(config_of(make_config), number=30)).version
    saved = (await client.save((await client.train(version, 1)).number)).checkpoint
    await client.close_run()
    reason, text = await message(config_of(make_config, "model"), checkpoint=saved.name, number=40)
    assert reason == "CHECKPOINT_MISMATCH" and "another critic" in text
    await client.close_run()
    # The policy alone goes on under an algorithm without a critic.
    back = await client.open(plain, checkpoint=saved.name, number=50)
    assert back.version.number == 50
