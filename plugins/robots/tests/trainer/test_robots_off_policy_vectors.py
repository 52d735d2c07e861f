"""Updates off policy are those of stable-baselines3 and sb3-contrib on the same batch, and IQL's those of its paper.

`data/off_policy_vectors.json` holds what their networks, losses and optimizers gave.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.policy import Observation
from headrace_robots.trainer.off_policy import losses
from headrace_robots.trainer.off_policy.imitation import CloningUpdate, RecapUpdate
from headrace_robots.trainer.off_policy.plugins import (
    CloningOptions,
    CrossQOptions,
    IqlOptions,
    RecapOptions,
    RlpdOptions,
    SacOptions,
    Td3BcOptions,
)
from headrace_robots.trainer.off_policy.updates import (
    Batch,
    CrossQUpdate,
    IqlUpdate,
    SacUpdate,
    Td3BcUpdate,
)
from headrace_robots.trainer.replay.ring import Ring

VECTORS = json.loads((Path(__file__).parent / "data" / "off_policy_vectors.json").read_text())
SMALL = {"critic_hidden": (8, 8), "gamma": 0.9, "tau": 0.1}
RATE = 0.01


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def policy_of(head, **more):
    config = {
        "kind": "mlp",
        "head": head,
        "activation": "relu",
        "hidden": [8, 8],
        "normalizer": None,
        "state_size": 3,
        "bounds": {"low": [-2.0], "high": [2.0]},
        **more,
    }
    return policy_config(config).build(0)


def batch_of(**more):
    given = {name: tensor(values) for name, values in VECTORS["batch"].items()}
    count = len(given["rew"])
    own = {
        "seen": Observation(given["obs"]),
        "actions_BCA": given["act"][:, None],
        "rewards_B": given["rew"],
        "discounts_B": 0.9 * (1 - given["done"]),
        "following": Observation(given["next"]),
        "weights_B": torch.ones(count),
        "successes_B": torch.zeros(count, dtype=torch.bool),
        "returns_B": torch.zeros(count),
        "shown_B": torch.zeros(count, dtype=torch.bool),
        "to_go_B": torch.zeros(count),
        "count": float(count),
    }
    return Batch(**own | more)


class AdamSteps:
    """torch's own Adam on each part, as the peer has it; remembers the losses."""

    def __init__(self, update):
        parts = {"actor": update.policy, **update.learned}
        self.given = {
            name: ([*part.parameters()], torch.optim.Adam(part.parameters(), lr=RATE))
            for name, part in parts.items()
        }
        self.losses = {}

    def step(self, name, loss):
        weights, optimizer = self.given[name]
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        for weight, gradient in zip(weights, found, strict=True):
            weight.grad = gradient
        optimizer.step()
        self.losses.setdefault(name, []).append(float(loss.detach()))

    def total(self, value):
        return value


def load_actor(policy, given, heads):
    """`heads` are the peer's last layers, whose outputs come one after the other."""
    names = {"0": "0", "2": "2"}
    with torch.no_grad():
        for own, peer in names.items():
            policy.actor[int(own)].weight.copy_(tensor(given[f"{heads[0]}.{peer}.weight"]))
            policy.actor[int(own)].bias.copy_(tensor(given[f"{heads[0]}.{peer}.bias"]))
        last = [head for head in heads[1:] if head]
        policy.actor[4].weight.copy_(torch.cat([tensor(given[f"{head}.weight"]) for head in last]))
        policy.actor[4].bias.copy_(torch.cat([tensor(given[f"{head}.bias"]) for head in last]))


SAC_HEADS = ("latent_pi", "mu", "log_std")
TD3_HEADS = ("mu", "mu.4")


def stacked(given, layer, name):
    """What the peer's two critics have at a layer, as ours lie: (E, inputs, outputs), or (E, 1, outputs)."""
    both = torch.stack([tensor(given[f"qf{place}.{layer}.{name}"]) for place in range(2)])
    return both.transpose(1, 2) if name == "weight" else both[:, None]


@torch.no_grad()
def load_critics(critics, given):
    for place, layer in enumerate(critics.layers):
        for own, peer in (("weight", "weight"), ("bias", "bias")):
            if f"qf0.{place}.{peer}" in given and hasattr(layer, own):
                getattr(layer, own).copy_(stacked(given, place, peer))


def assert_critics(critics, given):
    for place, layer in enumerate(critics.layers):
        for name in ("weight", "bias"):
            if hasattr(layer, name):
                assert torch.allclose(getattr(layer, name), stacked(given, place, name), atol=2e-6), (
                    place,
                    name,
                )


def assert_actor(policy, given, heads):
    other = policy_of(policy.config.head)
    load_actor(other, given, heads)
    for name, weight in policy.named_parameters():
        assert torch.allclose(weight, dict(other.named_parameters())[name], atol=2e-6), name


def noises(given):
    each = iter([tensor(noise)[:, None] for noise in given["noise"]])
    return lambda: next(each)


def test_sac_moves_policy_critics_targets_and_temperature_as_the_peer_does():
    given = VECTORS["sac"]
    policy = policy_of("squashed")
    update = SacUpdate(policy, SacOptions(**SMALL))
    load_actor(policy, given["before"]["actor"], SAC_HEADS)
    load_critics(update.critics, given["before"]["critic"])
    load_critics(update.targets, given["before"]["critic"])
    steps = AdamSteps(update)
    figures = update(batch_of(), 0, noises(given), steps)
    assert update.target_entropy == given["target_entropy"]
    assert steps.losses["critics"] == [pytest.approx(given["critic_loss"], rel=1e-5)]
    assert steps.losses["actor"] == [pytest.approx(given["actor_loss"], rel=1e-5)]
    assert steps.losses["temperature"] == [pytest.approx(given["temperature_loss"], abs=1e-6)]
    assert float(update.temperature.log.detach()) == pytest.approx(given["log_temperature"], abs=1e-6)
    assert float(figures["policy_entropy"]) == pytest.approx(-np.mean(given["log_prob"]), rel=1e-5)
    assert_critics(update.critics, given["after"]["critic"])
    assert_critics(update.targets, given["after"]["critic_target"])
    assert_actor(policy, given["after"]["actor"], SAC_HEADS)


def test_td3_moves_its_policy_at_every_second_update_as_the_peer_does():
    given = VECTORS["td3"]
    policy = policy_of("deterministic")
    load_actor(policy, given["before"]["actor"], TD3_HEADS)
    update = Td3BcUpdate(policy, Td3BcOptions(**SMALL, bc_alpha=None))
    load_critics(update.critics, given["before"]["critic"])
    load_critics(update.targets, given["before"]["critic"])
    steps, noise = AdamSteps(update), noises(given)
    for number in range(2):
        update(batch_of(), number, noise, steps)
    # Ours is half of theirs, which Adam does not see but by its eps.
    assert [2 * loss for loss in steps.losses["critics"]] == pytest.approx(given["critic_losses"], rel=1e-5)
    assert steps.losses["actor"] == [pytest.approx(given["actor_loss"], rel=1e-4)]
    assert_critics(update.targets, given["after"]["critic_target"])
    assert_actor(policy, given["after"]["actor"], TD3_HEADS)
    assert_actor(update.target_policy, given["after"]["actor_target"], TD3_HEADS)


@torch.no_grad()
def load_renormed(critics, given):
    load_critics(critics, given)
    for place, layer in enumerate(critics.layers):
        if f"qf0.{place}.ra_mean" in given:
            for own, peer in (
                ("scale", "scale"),
                ("shift", "bias"),
                ("mean", "ra_mean"),
                ("variance", "ra_var"),
            ):
                getattr(layer, own).copy_(stacked(given, place, peer))


@pytest.mark.parametrize(("name", "warmup"), [("crossq", 100_000), ("crossq_renormed", -1)])
def test_crossq_normalises_a_batch_and_what_follows_it_together_as_the_peer_does(name, warmup):
    given = VECTORS[name]
    policy = policy_of("squashed")
    options = CrossQOptions(**SMALL | {"actor_every": 3}, norm_warmup=max(0, warmup))
    update = CrossQUpdate(policy, options)
    for layer in update.critics.layers:
        if hasattr(layer, "_warmup"):
            layer._warmup = warmup
    load_renormed(update.critics, given["before"])
    update._sample = lambda seen, noise: (
        tensor(given["next_actions"])[:, None],
        tensor(given["next_log_probs"]),
    )
    values_EB, targets_B = update._differences(batch_of(), 0, lambda: None, torch.ones(()))
    assert torch.allclose(values_EB, tensor(given["values"]), atol=1e-5)
    assert torch.allclose(targets_B, tensor(given["target"]), atol=1e-5)
    loss = losses.critic_loss(values_EB, targets_B, torch.ones(6), 6.0)
    assert float(loss.detach()) == pytest.approx(given["critic_loss"], rel=1e-5)
    for place, layer in enumerate(update.critics.layers):
        if hasattr(layer, "variance"):
            assert torch.allclose(layer.mean, stacked(given["after"], place, "ra_mean"), atol=1e-6)
            assert torch.allclose(layer.variance, stacked(given["after"], place, "ra_var"), atol=1e-6)
    batch = batch_of()
    own_EB = update.values(update.critics, batch.seen, batch.actions_BCA)
    assert torch.allclose(own_EB, tensor(given["eval_values"]), atol=1e-5)


def test_rewards_of_several_steps_end_with_their_episode_as_the_peers_do():
    given = VECTORS["n_step"]
    ring = Ring(32, 1, 1)
    rewards = np.array(given["rewards"], np.float32)
    states = np.arange(11, dtype=np.float32)[:, None]
    for first, last, terminated in ((0, 6, True), (6, 10, False)):
        length = last - first
        ring.append(
            first,
            states[first : last + 1],
            np.zeros((length, 1)),
            rewards[first:last],
            terminated=terminated,
            priorities=np.ones(length),
            gamma=0.9,
        )
    rows = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 10])  # one behind the first episode is what it ended with
    drawn = ring.gather(rows, np.ones(10), gamma=0.9, steps=3)
    assert drawn.rewards_B == pytest.approx(given["returns"], abs=1e-6)
    assert drawn.discounts_B == pytest.approx(given["discounts"], abs=1e-6)
    assert drawn.next_states_BS[:, 0].tolist() == given["next"]
    to_go = [sum(0.9**later * reward for later, reward in enumerate(rewards[row:6])) for row in range(6)]
    assert drawn.returns_B[:6] == pytest.approx(to_go, abs=1e-6), "of all that came until the episode's end"


def test_td3_bc_weighs_the_value_by_its_mean_size_against_the_imitation():
    policy = policy_of("deterministic")
    update = Td3BcUpdate(policy, Td3BcOptions(**SMALL, actor_every=1))
    batch, steps = batch_of(), AdamSteps(update)
    before = [weight.clone() for weight in policy.parameters()]
    update(batch, 0, lambda: torch.zeros(6, 1, 1), steps)
    for weight, value in zip(policy.parameters(), before, strict=True):
        weight.data.copy_(value)
    drawn = torch.tanh(policy.outputs(batch.seen))
    values = update.values(update.critics, batch.seen, drawn)[0]
    imitation = (drawn - batch.actions_BCA).square().mean()
    wanted = imitation - 2.5 / values.abs().mean() * values.mean()
    assert steps.losses["actor"] == [pytest.approx(float(wanted.detach()), rel=1e-5)]


def test_iql_takes_an_expectile_of_its_own_actions_values_and_imitates_by_advantage():
    policy = policy_of("gaussian", activation="tanh")
    chosen = IqlOptions(**SMALL, expectile=0.8, inverse_temperature=2.0)
    update = IqlUpdate(policy, chosen)
    batch, steps = batch_of(), AdamSteps(update)
    with torch.no_grad():
        worth = update.values(update.targets, batch.seen, batch.actions_BCA).amin(0)
        difference = worth - update.value(batch.seen)[0, :, 0]
        weight = torch.where(difference < 0, 1 - 0.8, 0.8)
        value_loss = (weight * difference.square()).mean()
        log_probs = policy.evaluate(batch.seen, {"actions": batch.actions_BCA}).log_probs_BCA.sum((1, 2))
    update(batch, 0, lambda: torch.zeros(6, 1, 1), steps)
    assert steps.losses["value"] == [pytest.approx(float(value_loss), rel=1e-5)]
    assert [*steps.losses] == ["value", "actor", "critics"]
    # The policy's step sees the values after theirs, and the targets before their own.
    with torch.no_grad():
        advantage = worth - update.value(batch.seen)[0, :, 0]
        wanted = -((2.0 * advantage).exp().clamp(max=100) * log_probs).mean()
    assert steps.losses["actor"] == [pytest.approx(float(wanted), rel=1e-4)]


def test_an_ensemble_draws_which_critics_targets_have_the_least_and_raises_their_mean():
    policy = policy_of("squashed")
    update = SacUpdate(policy, RlpdOptions(**SMALL, critics=5, actor_every=2))
    values_EB = torch.arange(10.0).view(5, 2)
    chosen = {tuple(update.some(values_EB, number)[:, 0].tolist()) for number in range(40)}
    assert all(len(each) == 2 for each in chosen) and len(chosen) > 10
    steps = AdamSteps(update)
    noise = lambda: torch.zeros(6, 1, 1)  # noqa: E731
    update(batch_of(), 0, noise, steps)
    assert "actor" not in steps.losses
    update(batch_of(), 1, noise, steps)
    assert len(steps.losses["actor"]) == 1 and len(steps.losses["critics"]) == 2
    # What a critic reads is normalised behind each of its layers.
    assert sum(type(layer).__name__ == "LayerNorm" for layer in update.critics.layers) == 2


def test_a_categorical_policy_learns_what_its_categories_are_worth():
    bounds = {"low": [0.0], "high": [2.0]}
    policy = policy_of("gaussian", categories=[3], bounds=bounds)
    update = SacUpdate(policy, SacOptions(**SMALL, temperature=0.05))
    actions = torch.tensor([0, 1, 2, 0, 1, 2.0])[:, None, None]
    batch = batch_of(
        actions_BCA=actions, rewards_B=(actions[:, 0, 0] == 1).float(), discounts_B=torch.zeros(6)
    )
    steps = AdamSteps(update)
    for number in range(150):
        update(batch, number, lambda: torch.zeros(6, 1, 1), steps)
    chosen = policy.act(batch.seen, range(6), deterministic=True).executed_BCA
    assert chosen.flatten().tolist() == [1] * 6
    assert steps.losses["critics"][-1] < 0.05 < steps.losses["critics"][0]


def test_cloning_weighs_successes_returns_and_demonstrations():
    policy = policy_of("squashed")
    flags = torch.tensor([True, False, False, False, False, False])
    by_success = CloningUpdate(policy, CloningOptions())
    batch = batch_of(successes_B=flags, shown_B=flags.roll(1))
    steps = AdamSteps(by_success)
    errors = policy.imitate(batch.seen, 2 * batch.actions_BCA, ()).mean(-1).detach()
    figures = by_success(batch, 0, lambda: None, steps)
    assert float(figures["imitated_share"]) == pytest.approx(2 / 6)
    assert steps.losses["actor"][0] == pytest.approx(float(errors[:2].mean()), rel=1e-5)
    by_return = CloningUpdate(policy, CloningOptions(weigh="return", inverse_temperature=1.0))
    returns = torch.arange(6.0)
    weights = by_return._weights(batch_of(returns_B=returns), steps)
    spread = (returns - returns.mean()).square().mean().sqrt()
    assert torch.allclose(weights, ((returns - returns.mean()) / spread).exp(), atol=1e-5)


def recap_of(policy, **options):
    return RecapUpdate(policy, RecapOptions(critic_hidden=(8, 8), gamma=0.9, **options))


def test_an_advantage_is_what_came_within_some_chunks_less_the_value_before():
    update = recap_of(policy_of("gaussian", conditioned=True))
    batch, steps, found = batch_of(to_go_B=torch.arange(6.0)), AdamSteps(update), []
    with torch.no_grad():
        values, following = (update.value(seen)[0, :, 0] for seen in (batch.seen, batch.following))
    update.better = lambda batch, advantages, steps: (
        found.append(advantages) or (batch.shown_B, torch.zeros(()))
    )
    figures = update(batch, 0, lambda: torch.zeros(6, 1, 1), steps)
    assert torch.allclose(found[0], batch.rewards_B + batch.discounts_B * following - values)
    assert steps.losses["value"] == [
        pytest.approx(float((torch.arange(6.0) - values).square().mean()), rel=1e-5)
    ]
    assert float(figures["value_mean"]) == pytest.approx(float(values.mean()), rel=1e-5)


def test_the_largest_advantages_are_better_than_most_and_demonstrations_always():
    update = recap_of(policy_of("gaussian", conditioned=True), better_share=0.4)
    batch = batch_of(shown_B=torch.tensor([False] * 5 + [True]))
    better, threshold = update.better(batch, tensor([1, 2, 3, 4, 5, -9]), AdamSteps(update))
    assert float(threshold) == pytest.approx(3.4), "of the policy's own five"
    assert better.tolist() == [False, False, False, True, True, True]
    # Of those that come to the threshold all count where it is above 0, else none: half succeed, or few do.
    for advantages, wanted in (([0.5, 0.5, 0.5, -0.5, -0.5, -9], 3), ([0.5, -0.5, -0.5, -0.5, -0.5, -9], 1)):
        better, _ = update.better(batch, tensor(advantages), AdamSteps(update))
        assert better.tolist() == [True] * wanted + [False] * (5 - wanted) + [True]


def test_a_policy_is_told_of_its_actions_but_for_the_dropped_share():
    policy = policy_of("gaussian", conditioned=True)
    update = recap_of(policy, better_share=0.5, dropped_share=0.3)
    noise = tensor([-2, -0.53, -0.52, 0, 1, 2])[:, None, None]  # 0.3 of normal numbers lie below -0.524
    batch = batch_of(shown_B=torch.tensor([True, True, True, False, False, False]))
    update.better = lambda batch, advantages, steps: (batch.shown_B, torch.zeros(()))
    wanted = policy.head.imitate(
        policy.outputs(batch.seen, tensor([0, 0, 1, -1, -1, -1])), policy.head.executed(batch.actions_BCA)
    )
    steps = AdamSteps(update)
    update(batch, 0, lambda: noise, steps)
    assert steps.losses["actor"] == [pytest.approx(float(wanted.detach().mean()), rel=1e-5)]


def test_a_conditioned_policy_acts_as_told_yes_and_beyond_where_it_is_guided():
    policy = policy_of("gaussian", conditioned=True, guidance=2.0)
    seen = batch_of().seen
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100)
        told, untold = (policy.outputs(seen, torch.full((6,), value)) for value in (1.0, 0.0))
        assert (told - untold).abs().min() > 1e-3
        assert torch.allclose(policy.outputs(seen), untold + 2 * (told - untold))
        drawn = policy.act(seen, [0] * 6, deterministic=True).sampled["actions"]
    assert torch.allclose(drawn, untold + 2 * (told - untold))


def test_recap_acts_better_than_what_it_imitates():
    policy = policy_of("gaussian", conditioned=True, hidden=[32])
    update = recap_of(policy)
    steps, generator = AdamSteps(update), torch.Generator().manual_seed(0)
    seen = Observation(torch.zeros(64, 3))
    for number in range(300):
        actions = torch.rand(64, 1, 1, generator=generator) * 2 - 1
        batch = batch_of(
            seen=seen,
            following=seen,
            actions_BCA=actions,
            weights_B=torch.ones(64),
            successes_B=torch.zeros(64, dtype=torch.bool),
            returns_B=torch.zeros(64),
            shown_B=torch.zeros(64, dtype=torch.bool),
            to_go_B=(actions[:, 0, 0] > 0.2).float(),
            rewards_B=(actions[:, 0, 0] > 0.2).float(),
            discounts_B=torch.zeros(64),
            count=64.0,
        )
        update(batch, number, lambda: torch.randn(64, 1, 1, generator=generator), steps)
    told = [
        float(policy.outputs(Observation(torch.zeros(1, 3)), tensor([value])).detach())
        for value in (-1, 0, 1)
    ]
    assert told[0] < -0.2 < told[1] < 0.2 < 0.5 < told[2] < 0.7, (
        "the better actions have a mean of 0.6, all of 0"
    )
