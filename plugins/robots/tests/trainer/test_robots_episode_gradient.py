"""The gradient of a step of episodes: against a plain PPO, in any order, over two ranks, with masks and without worth.

Shapes: N actions of all episodes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace_robots.policies.directory import initial_policy
from headrace_robots.policies.policy import Observation
from headrace_robots.trainer.wire import Spaces, read_episodes
from headrace_schema.openings import TrainerConfig
from headrace_trainer.learning import step as steps
from headrace_trainer.workloads import run_kind

OPTIONS = {"gamma": 0.9, "lam": 0.8, "reward_scale": 0.5, "value_coefficient": 0.7, "entropy_coef": 0.03}


class OneRank:
    """The rounds of a step, played on backends of this process; what `apply` would step with is kept."""

    def __init__(self, backends):
        self.backends = backends
        self.replicas = len(backends)
        self.gradients, self.lent = [], []

    def read(self, episodes, owners):
        found = []
        for replica, backend in enumerate(self.backends):
            own = [place for place, owner in enumerate(owners) if owner == replica]
            given = [each if place in own else each.without_pictures() for place, each in enumerate(episodes)]
            found += backend.read(given, own)
        return found

    def credit(self, data):
        for backend in self.backends:
            backend.credit(data)

    def chunks(self, work, lent):
        self.lent += [pictures.chunks for pictures in lent]
        parts = zip(self.backends, work, lent, strict=True)
        return min(backend.learn(own, pictures) for backend, own, pictures in parts)

    def apply(self, denominator, rate, critic_rate):
        parts = [backend.reduced_gradient(denominator) for backend in self.backends]
        self.gradients.append({name: sum(part[name] for part in parts) for name in parts[0]})
        return self.backends[0].commit(1.0, 0.0)

    def hold(self):
        return None

    def end_hold(self, *, back):
        assert not back

    def end_episodes(self, *, learned):
        for backend in self.backends:
            backend.end_episodes(learned=learned)


@pytest.fixture
def gradient(trainer_group, robot_config, robots):
    """(gradient by name, policy) of one optimizer step from groups of episodes; `ranks` share the work."""

    def run(config, groups, ranks=1):
        parsed = TrainerConfig.model_validate(config)
        kind = run_kind(parsed)
        algorithm = kind.algorithm()
        backends = [kind.backend(algorithm, _Place(trainer_group, rank, ranks)) for rank in range(ranks)]
        for backend in backends:
            backend.load_initial()
        rounds = OneRank(backends)
        learner = kind.learner(algorithm, rounds)
        state = steps.restored(steps.StepState(), steps.Version(1, 0, 0), {})
        state, _ = steps.begin(state, steps.Begin(0, 1, 1, 2))
        spaces = Spaces.of(backends[0]._policy.config)
        for group in groups:
            state = learner.learn(state, [read_episodes(group, spaces)])
        assert learner.finish(state, 0.0).finite
        run.lent = rounds.lent
        return rounds.gradients[0], backends[0]._policy

    return run


class _Place:
    """One of several ranks that share a process: sums are made by who asks for them."""

    def __init__(self, trainer_group, rank, world_size):
        self.device, self.rank, self.place = trainer_group.device, rank, (rank, world_size)
        self.rank, self.world_size = rank, world_size

    def share(self, tensor):
        return None

    def all_true(self, flag):
        return flag

    def sum(self, values):
        return dict(values)

    maximum = sum


@pytest.fixture
def episodes(robots):
    """Eight episodes of the policy of a config, half of which may end by success before the time limit."""

    def run(config):
        parsed = TrainerConfig.model_validate(config)
        policy = initial_policy(parsed.model, parsed.seed)
        worlds = [robots.Reach(horizon=10 + place, ends_on_success=True, radius=0.5) for place in range(8)]
        return robots.play(policy, worlds, range(8), 5)

    return run


def plain(policy, episodes, config, *, gamma, lam, reward_scale, value_coefficient, entropy_coef):
    """PPO's gradient before the first optimizer step, as a textbook has it: one action a chunk, ratio 1."""
    advantages, returns, losses = [], [], []
    with torch.no_grad():
        for episode in episodes:
            states = torch.from_numpy(episode.observation["state"])
            values = policy.critic(states)[:, 0].double().tolist()
            final = 0.0
            if episode.truncated:
                final = float(policy.critic(torch.from_numpy(episode.final_observation["state"])[None]))
            following, advantage, own = final, 0.0, []
            for t in reversed(range(len(values))):
                delta = reward_scale * float(episode.rewards_TC[t, 0]) + gamma * following - values[t]
                advantage = delta + gamma * lam * advantage
                own.append(advantage)
                following = values[t]
            own.reverse()
            advantages += own
            returns += [a + v for a, v in zip(own, values, strict=True)]
    advantage_N = torch.tensor(advantages, dtype=torch.float64)
    advantage_N = ((advantage_N - advantage_N.mean()) / advantage_N.std()).float()
    states = torch.from_numpy(np.concatenate([e.observation["state"] for e in episodes]))
    drawn = torch.from_numpy(np.concatenate([e.sampled["actions"][:, 0] for e in episodes]))
    found = torch.distributions.Normal(policy.actor(states), policy.head.log_std[0].exp())
    log_prob_N = found.log_prob(drawn).sum(-1)
    losses = -(log_prob_N - log_prob_N.detach()).exp() * advantage_N
    values = 0.5 * (policy.critic(states)[:, 0] - torch.tensor(returns).float()).square()
    entropy = found.entropy().sum(-1)
    (losses + value_coefficient * values - entropy_coef * entropy).mean().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def settle(robots, played, *, group=1, **more):
    version = robots.common_pb2.PolicyVersion(number=1)
    parts = [played[place : place + group] for place in range(0, len(played), group)]
    return [robots.settled(prompt, part, version, **more) for prompt, part in enumerate(parts)]


def test_the_gradient_is_that_of_a_plain_ppo(gradient, episodes, robots, robot_config, relative_l2):
    config = robot_config(options=OPTIONS, policy={"normalizer": None})
    played = episodes(config)
    assert {episode.truncated for episode in played} == {True, False}
    found, policy = gradient(config, settle(robots, played))
    expected = plain(policy, played, config, **OPTIONS)
    assert relative_l2(found, expected) <= 1e-5


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_order_and_split_over_ranks_change_nothing(
    name, gradient, episodes, robots, robot_config, relative_l2
):
    config = robot_config(name, group_size=2, policy={"chunk_length": 3})
    groups = settle(robots, episodes(config), group=2)
    expected, _ = gradient(config, groups)
    turned, _ = gradient(config, groups[::-1])
    assert all(torch.equal(turned[name], value) for name, value in expected.items())
    split, _ = gradient(config, groups, ranks=2)
    assert relative_l2(split, expected) <= 1e-5
    apart = config | {"trainer": {"micro_batch_tokens": 12}}
    assert relative_l2(gradient(apart, groups)[0], expected) <= 1e-5


def test_pictures_of_other_ranks_are_lent_where_shares_would_be_uneven(
    gradient, episodes, robots, robot_config, relative_l2
):
    """A rank has pictures of its own episodes, and of no other chunk than it learns from."""
    played = [
        replace(each, observation=each.observation | pictures(len(each.valid_TC), 3), final_observation=last)
        for each in episodes(robot_config(policy={"chunk_length": 3}))
        for last in [each.final_observation | pictures(1, 9, final=True) if each.truncated else {}]
    ]
    seeing = {"kind": "cnn", "cameras": ["eye"], "height": 40, "width": 40, "features": 8, "chunk_length": 3}
    config = robot_config(policy=seeing)
    groups = settle(robots, played)
    expected, _ = gradient(config, groups)
    assert gradient.lent == [[]], "one rank owns all"
    split, _ = gradient(config, groups, ranks=3)
    assert relative_l2(split, expected) <= 1e-5
    chunks = sum(len(each.valid_TC) for each in played)
    assert 0 < sum(map(len, gradient.lent)) < chunks / 3


def pictures(count, seed, *, final=False):
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 40, 40, 3), np.uint8)
    return {"image/eye": drawn[0] if final else drawn}


def test_levels_agree_where_a_chunk_is_one_number(gradient, episodes, robots, robot_config, relative_l2):
    """A chunk of one action of one number is a unit at every level."""
    one = {"state_size": 6, "bounds": {"low": [-1.0], "high": [1.0]}}
    found = []
    for level in ("token", "action", "chunk"):
        config = robot_config(options={"level": level}, policy=one)
        played = episodes(config)
        found.append(gradient(config, settle(robots, played))[0])
    for one, other in itertools.pairwise(found):
        assert relative_l2(one, other) <= 1e-6


def test_equal_rewards_give_no_policy_gradient(gradient, episodes, robots, robot_config):
    config = robot_config("grpo", group_size=2)
    found, _ = gradient(config, settle(robots, episodes(config), group=2, reward=lambda _: 1.0))
    assert all(not value.any() for value in found.values())


def test_what_was_not_executed_or_is_masked_counts_nothing(gradient, episodes, robots, robot_config):
    """Draws behind an episode's end, rewards of them, and masked episodes leave the gradient as it is."""
    config = robot_config(options=OPTIONS, policy={"chunk_length": 4})
    played = episodes(config)
    groups = settle(robots, played)
    expected, _ = gradient(config, groups)
    cut = next(index for index, episode in enumerate(played) if not episode.valid_TC[-1].all())
    sampled = played[cut].sampled["actions"].copy()
    sampled[~played[cut].valid_TC] = 0.123
    rewards = np.where(played[cut].valid_TC, played[cut].rewards_TC, 77.0).astype(np.float32)
    played[cut] = replace(played[cut], sampled={"actions": sampled}, rewards_TC=rewards)
    found, _ = gradient(config, settle(robots, played))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    without, _ = gradient(config, groups[1:])
    groups[0].members[0].masked = True
    masked, _ = gradient(config, groups)
    assert all(torch.allclose(masked[name], value, rtol=1e-4, atol=1e-7) for name, value in without.items())


@pytest.mark.parametrize("until", [True, False])
def test_an_action_behind_the_first_success_is_not_learned_from(
    until, gradient, episodes, robots, robot_config
):
    config = robot_config("grpo", group_size=2, options={"until_success": until})
    played = episodes(config)
    place = max(range(8), key=lambda index: played[index].steps)
    flags = np.zeros_like(played[place].successes_TC)
    flags[4:] = True
    drawn = played[place].sampled["actions"].copy()
    drawn[5:] += 0.05
    found = []
    for sampled in (played[place].sampled, {"actions": drawn}):
        played[place] = replace(played[place], successes_TC=flags, sampled=sampled)
        found.append(gradient(config, settle(robots, played, group=2))[0])
    assert until == all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_an_update_makes_what_was_worth_more_more_likely(gradient, episodes, robots, robot_config):
    config = robot_config("grpo", group_size=8, options={"until_success": False})
    played = episodes(config)
    found, policy = gradient(config, settle(robots, played, group=8))
    rewards = np.array([episode.total_reward for episode in played])
    worth = np.repeat(rewards - rewards.mean(), [episode.steps for episode in played])
    states = torch.from_numpy(np.concatenate([e.observation["state"] for e in played]))
    drawn = {"actions": torch.from_numpy(np.concatenate([e.sampled["actions"] for e in played]))}
    worth_N = torch.from_numpy(worth)
    before_N = policy.evaluate(Observation(states), drawn).log_probs_BCA.detach().sum((1, 2))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter -= 1e-2 * found[name]
    after_N = policy.evaluate(Observation(states), drawn).log_probs_BCA.detach().sum((1, 2))
    assert ((after_N - before_N) * worth_N).mean() > 0
