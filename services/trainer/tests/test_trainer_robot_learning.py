"""A robot policy learns by PPO, in one process, from the functions that rollout and trainer share.

Shapes: B environments, T chunks of an episode, C actions of a chunk, A numbers of an action, N = B T, M a minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from headrace_modelkit.robot.actor_critic import MlpConfig, MlpPolicy
from headrace_modelkit.robot.policy import ActionChunk, Observation, at_level
from headrace_modelkit.robot.scaling import ActionBounds
from headrace_trainer import algorithms as alg
from torch import Tensor

HORIZON = 24


@dataclass
class Reach:
    """Points that are pushed over a square toward goals of their own; every seed has other goals.

    A state is the point's place and velocity and the goal; an action is a push, -1 to 1 both ways. The reward is the
    distance, negative. Nothing terminates; the horizon truncates.
    """

    seed: int
    count: int
    state_BS: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        places = torch.rand(self.count, 4, generator=generator) * 2 - 1
        self.state_BS = torch.cat([places[:, :2], torch.zeros(self.count, 2), places[:, 2:]], 1)

    def step(self, action_BA: Tensor) -> tuple[Tensor, Tensor]:
        """(rewards, successes) of a push; an action outside the bounds is refused."""
        assert action_BA.abs().max() <= 1
        place, velocity, goal = self.state_BS.split(2, 1)
        velocity = 0.5 * velocity + 0.15 * action_BA
        self.state_BS = torch.cat([place + velocity, velocity, goal], 1)
        distance_B = (place + velocity - goal).norm(dim=1)
        return -distance_B, distance_B < 0.1


@dataclass(frozen=True)
class Episodes:
    """One whole episode of each environment."""

    observations: list[Observation]
    chunks: list[ActionChunk]
    rewards_BTC: Tensor
    success_BTC: Tensor
    final: Observation


def play(policy: MlpPolicy, seed: int, count: int, *, deterministic: bool = False) -> Episodes:
    """Episodes of `count` environments whose goals come from the seed."""
    world = Reach(seed, count)
    observations: list[Observation] = []
    chunks: list[ActionChunk] = []
    outcomes = []
    for step in range(HORIZON // policy.chunk_length):
        observations.append(Observation(world.state_BS))
        draws = [(seed * 1000 + step) * 1000 + row for row in range(count)]
        chunks.append(policy.act(observations[-1], draws, deterministic=deterministic))
        outcomes.append([world.step(action_BA) for action_BA in chunks[-1].executed_BCA.unbind(1)])
    rewards_BTC, success_BTC = (
        torch.stack([torch.stack([found[part] for found in row], 1) for row in outcomes], 1)
        for part in (0, 1)
    )
    return Episodes(observations, chunks, rewards_BTC, success_BTC, Observation(world.state_BS))


def success_rate(policy: MlpPolicy) -> float:
    """Share of episodes with unseen goals in which the greedy policy succeeds at any step."""
    return float(play(policy, 10_000, 64, deterministic=True).success_BTC.flatten(1).any(1).float().mean())


def new_policy(seed: int, *, chunk_length: int = 1) -> MlpPolicy:
    """`mlp` as the recipe has it."""
    return MlpConfig(bounds=ActionBounds.unit(2), state_size=6, chunk_length=chunk_length).build(seed)


def train(policy: MlpPolicy, *, seed: int, iterations: int, environments: int = 32) -> int:
    """PPO; returns the environment steps that it took."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, eps=1e-5)
    for iteration in range(iterations):
        found = play(policy, seed * 100 + iteration, environments)
        _learn(policy, optimizer, found, torch.Generator().manual_seed(iteration))
        assert policy.normalizer is not None
        policy.normalizer.update(torch.cat([seen.state_BS for seen in found.observations]))
    return iterations * environments * HORIZON


def credit(policy: MlpPolicy, found: Episodes) -> tuple[Tensor, Tensor]:
    """(B, T, C) advantages and (B, T) returns."""
    values_BT = torch.stack([chunk.values_B for chunk in found.chunks], 1)
    valid_BTC = torch.stack([chunk.valid_BC for chunk in found.chunks], 1)
    rewards_BTC = found.rewards_BTC / 10
    truncated_BT = torch.zeros_like(values_BT, dtype=torch.bool)
    truncated_BT[:, -1] = True
    with torch.no_grad():
        final_values_BT = torch.zeros_like(values_BT)
        final_values_BT[:, -1] = policy(found.final)[1]
    advantages_BT, returns_BT = alg.episode_advantages(
        alg.chunk_rewards(rewards_BTC, valid_BTC),
        values_BT,
        terminated_BT=torch.zeros_like(truncated_BT),
        truncated_BT=truncated_BT,
        final_values_BT=final_values_BT,
        next_values_B=torch.zeros(len(values_BT)),
        gamma=0.97,
        lam=0.95,
    )
    return alg.whiten(alg.action_advantages(advantages_BT, rewards_BTC, valid_BTC), valid_BTC), returns_BT


def _learn(
    policy: MlpPolicy, optimizer: torch.optim.Optimizer, found: Episodes, generator: torch.Generator
) -> None:
    advantages_BTC, returns_BT = credit(policy, found)
    states_NS = torch.stack([seen.state_BS for seen in found.observations], 1).flatten(0, 1)
    sampled = torch.stack([chunk.sampled["actions"] for chunk in found.chunks], 1).flatten(0, 1)
    old = torch.stack([chunk.log_probs_BCA for chunk in found.chunks], 1).flatten(0, 1)
    valid_NC = torch.stack([chunk.valid_BC for chunk in found.chunks], 1).flatten(0, 1)
    advantages_NC, returns_N = advantages_BTC.flatten(0, 1), returns_BT.flatten()
    for _ in range(10):
        for rows in torch.randperm(len(states_NS), generator=generator).split(400):
            now = policy.evaluate(Observation(states_NS[rows]), {"actions": sampled[rows]})
            new_MC, mask_MC = at_level(now.log_probs_BCA, valid_NC[rows], "action")
            old_MC, _ = at_level(old[rows], valid_NC[rows], "action")
            loss, figures = alg.ppo_loss(new_MC, old_MC, advantages_NC[rows], mask_MC)
            values = alg.value_loss(now.values_B[:, None], None, returns_N[rows, None]).loss
            optimizer.zero_grad()
            (loss + 0.5 * values).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        if figures["approx_kl"] > 0.03:
            return


@pytest.mark.parametrize(("chunk_length", "iterations"), [(1, 20), (2, 24)])
def test_mlp_learns_to_reach_unseen_goals_by_ppo(chunk_length, iterations):
    policy = new_policy(0, chunk_length=chunk_length)
    before = success_rate(policy)
    steps = train(policy, seed=1, iterations=iterations)
    assert before <= 0.2 and success_rate(policy) >= 0.75
    assert steps <= 20_000


def test_other_seeds_are_other_goals_and_the_same_seed_is_the_same_episode():
    policy = new_policy(0)
    first, again, other = (play(policy, seed, 4) for seed in (1, 1, 2))
    assert torch.equal(first.rewards_BTC, again.rewards_BTC)
    assert not torch.isclose(first.observations[0].state_BS, other.observations[0].state_BS).all(1).any()


def test_an_update_moves_the_policy_toward_rewarded_actions():
    """What earned more than its chunk expected becomes more likely, what earned less becomes less."""
    policy = new_policy(0, chunk_length=4)
    found = play(policy, 3, 32)
    advantages_BTC, _ = credit(policy, found)
    chunk, seen = found.chunks[0], found.observations[0]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    before_BC = at_level(chunk.log_probs_BCA, chunk.valid_BC, "action")[0]
    _learn(policy, optimizer, found, torch.Generator().manual_seed(0))
    now = policy.evaluate(seen, chunk.sampled)
    moved_BC = at_level(now.log_probs_BCA, chunk.valid_BC, "action")[0].detach() - before_BC
    assert (moved_BC * advantages_BTC[:, 0]).mean() > 0
