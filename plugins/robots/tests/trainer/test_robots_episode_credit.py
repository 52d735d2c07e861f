"""What PPO credits the actions of a chunk with, at every level, against GAE step by step and by enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from headrace_robots.trainer.algorithms import build_episode_algorithm
from headrace_robots.trainer.algorithms._base import Credit, EpisodeOutcomes
from headrace_schema.sections.learning import AlgorithmSection

LEVELS = ("token", "action", "chunk")
Episode = tuple[list[list[float]], list[float], float | None]
"""Rewards of each chunk's executed actions, values of the chunks, value of the end; None: it ended by itself."""


def credit(level: str, episodes: list[Episode], actions: int, **options: object) -> Credit:
    longest = max(len(rewards) for rewards, _, _ in episodes)
    rewards = torch.zeros(len(episodes), longest, actions, dtype=torch.float64)
    valid, values = (
        torch.zeros_like(rewards, dtype=torch.bool),
        torch.zeros(len(episodes), longest, dtype=torch.float64),
    )
    for row, (earned, own, _) in enumerate(episodes):
        for chunk, each in enumerate(earned):
            rewards[row, chunk, : len(each)] = torch.tensor(each, dtype=torch.float64)
            valid[row, chunk, : len(each)] = True
            values[row, chunk] = own[chunk]
    ends = [end for _, _, end in episodes]
    algorithm = build_episode_algorithm(
        AlgorithmSection(name="ppo", group_size=1, options={"level": level, "whiten": False, **options})
    )
    return algorithm.credit(
        EpisodeOutcomes(
            rewards_B=rewards.sum((1, 2)),
            groups_B=torch.arange(len(episodes)),
            trained_B=torch.ones(len(episodes), dtype=torch.bool),
            rewards_BTC=rewards,
            successes_BTC=torch.zeros_like(valid),
            valid_BTC=valid,
            values_BT=values,
            final_values_B=torch.tensor([0.0 if end is None else end for end in ends], dtype=torch.float64),
            terminated_B=torch.tensor([end is None for end in ends]),
        )
    )


@pytest.mark.parametrize("level", LEVELS)
def test_actions_that_earn_what_an_exact_critic_expects_have_no_advantage(level):
    """Each action earns 1, chunks of ten: RLinf's chunk level; without the expected part an action would lose nine."""
    chunks, actions = 6, 10
    values = [float(actions * (chunks - chunk)) for chunk in range(chunks)]
    found = credit(level, [([[1.0] * actions] * chunks, values, None)], actions, gamma=1.0, lam=1.0)
    assert found.advantages.abs().max() == 0.0
    assert found.returns_BT is not None and found.returns_BT[0].tolist() == values


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.5), (0.99, 0.0)])
def test_an_action_has_its_chunks_advantage(level, gamma, lam):
    """By definition: chunks of which the last was cut short by an end or a time limit, each worth gamma of the next."""
    rng = random.Random(3)
    episodes: list[Episode] = []
    for chunks, last, end in ((3, 4, None), (2, 2, 1.5), (1, 1, None), (4, 3, -0.5)):
        sizes = [4] * (chunks - 1) + [last]
        earned = [[rng.gauss(0, 1) for _ in range(size)] for size in sizes]
        episodes.append((earned, [rng.gauss(0, 1) for _ in sizes], end))
    found = credit(level, episodes, 4, gamma=gamma, lam=lam)
    for row, (earned, values, end) in enumerate(episodes):
        following, advantage = end or 0.0, 0.0
        for chunk in reversed(range(len(earned))):
            delta = math.fsum(earned[chunk]) + gamma * following - values[chunk]
            advantage, following = delta + gamma * lam * advantage, values[chunk]
            wanted = [advantage] if level == "chunk" else [advantage] * len(earned[chunk])
            assert found.advantages[row, chunk, : len(wanted)].tolist() == pytest.approx(wanted)
            assert found.returns_BT is not None
            assert float(found.returns_BT[row, chunk]) == pytest.approx(advantage + values[chunk])
            if level != "chunk":
                assert found.mask_BTC[row, chunk].sum() == len(earned[chunk])
                assert not found.advantages[row, chunk, len(earned[chunk]) :].any()


def test_the_expected_gradient_is_that_of_the_return():
    """Two chunks of two actions, each 0 or 1; what an action earns depends on all before it, and 1, 1 ends it early."""
    chances = [[0.3, 0.6], [0.8, 0.45]]

    def earns(path: tuple[int, ...]) -> float:
        return math.sin(1.7 * len(path) + sum(3 * value + place for place, value in enumerate(path)))

    def play(path: tuple[int, ...]) -> list[list[float]]:
        earned = [[earns(path[: at + 1]) for at in range(2)]]
        if path[:2] != (1, 1):
            earned.append([earns(path[: at + 1]) for at in (2, 3)])
        return earned

    found, wanted = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    for path in itertools.product((0, 1), repeat=4):
        earned = play(path)
        weight = math.prod(
            chances[at // 2][at % 2] if value else 1 - chances[at // 2][at % 2]
            for at, value in enumerate(path)
        )
        values = [0.7, -0.4][: len(earned)]
        given = credit("action", [(earned, values, None)], 2, gamma=1.0, lam=1.0)
        for chunk in range(len(earned)):
            for action in range(2):
                slope = path[2 * chunk + action] - chances[chunk][action]
                found[chunk, action] += weight * float(given.advantages[0, chunk, action]) * slope
                wanted[chunk, action] += weight * math.fsum(map(math.fsum, earned)) * slope
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("score", "returns"), [("none", [2, 1]), ("add", [4, 3]), ("replace", [2, 2])])
def test_a_score_is_earned_by_the_last_action_that_was_executed(score, returns):
    """Scorers say the sum of rewards, 2; the second chunk's second action was not executed."""
    episode: Episode = ([[1.0, 0.0], [1.0]], [0.0, 0.0], None)
    found = credit("action", [episode], 2, gamma=1.0, lam=1.0, score=score)
    assert found.returns_BT is not None and found.returns_BT[0].tolist() == returns
