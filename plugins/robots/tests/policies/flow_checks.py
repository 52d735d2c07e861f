"""What holds of policies that draw by flow matching beside a vision-language model: two rows, horizon 4, chunk 3."""

from __future__ import annotations

import torch
from headrace_robots.policies.directory import policy_config

ONE_WIDTH = {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.3, 0.3)}
"""Flow-Noise between two widths that are one: each step is the ODE's, and noise of that width."""


def shaken(policy, width):
    """The policy with noise in each parameter, so that none of them is zero."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * width)
    return policy


def check_log_probs_are_those_of_the_steps_gaussians(fields, width, observation, velocity):
    """Of what is drawn and of what is scored again, by `velocity(policy, observation, point, time)`."""
    policy = shaken(policy_config({**fields, "flow": ONE_WIDTH}).build(0), width)
    chunk = policy.act(observation, [4, 5])
    path = chunk.sampled["path"]
    summed = torch.zeros_like(path[:, 0])
    with torch.no_grad():
        for step in range(3):
            speed = velocity(policy, observation, path[:, step], torch.full((2,), 1 - step / 3))
            summed += torch.distributions.Normal(path[:, step] - speed / 3, 0.3).log_prob(path[:, step + 1])
        again = policy.evaluate(observation, chunk.sampled)
    torch.testing.assert_close(chunk.log_probs_BCA, summed[:, :3, :2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again.log_probs_BCA, summed[:, :3, :2], rtol=1e-3, atol=1e-3)


def check_a_draw_does_not_depend_on_who_else_is_in_the_batch(fields, width, observation):
    """Of the second row alone, and behind the first."""
    policy = shaken(policy_config(fields).build(0), width)
    both = policy.act(observation, [4, 5])
    alone = policy.act(observation.take([1]), [5])
    torch.testing.assert_close(both.executed_BCA[1:], alone.executed_BCA, rtol=1e-4, atol=1e-5)
