"""Log-probs of flow policies: against densities, marginals and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from headrace_robots.policies.flows import flow
from headrace_robots.policies.flows.flow import FlowConfig, NoiseHead
from headrace_robots.policies.paths import PATH, STEPS
from pydantic import ValidationError

CPU = torch.device("cpu")
MEAN, WIDTH = 0.7, 0.3


def exact_field(point, time_B):
    """The velocity of a flow from N(0, 1) at time 1 to N(MEAN, WIDTH^2) at time 0: E[noise - action | point]."""
    time = time_B[:, None, None]
    variance = (1 - time) ** 2 * WIDTH**2 + time**2
    ahead = point - (1 - time) * MEAN
    noise, action = time * ahead / variance, MEAN + (1 - time) * WIDTH**2 * ahead / variance
    return noise - action, torch.full_like(point, math.log(0.1))


class Net(torch.nn.Module):
    """A small field with learned widths, in float64."""

    def __init__(self, config) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.head = NoiseHead(2, 2, config)

    def forward(self, point, time_B):
        time = time_B.to(point.dtype)[:, None, None].expand(*point.shape[:-1], 1)
        velocity = self.layers(torch.cat([point, time], -1))
        return velocity, self.head(velocity)


@pytest.mark.parametrize("drawn", ["one", "all"])
@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_a_path_is_scored_as_it_was_drawn_with_the_right_gradient(noise, drawn):
    config = FlowConfig(steps=4, noise=noise, drawn=drawn)
    torch.manual_seed(0)
    net = Net(config).double()

    def field(point, time_B):
        return net(point.double(), time_B)

    sampled, log_probs = flow.draw(field, config, range(6), (3, 2), CPU, range(6))
    assert sampled[PATH].shape == (6, 5, 3, 2) and sampled[STEPS].shape == (6, 4 if drawn == "all" else 1)
    again, _ = flow.score(field, config, sampled)
    assert torch.equal(again, log_probs)  # the ratio is exactly 1
    weights = torch.randn(again.shape, dtype=torch.float64)
    (again * weights).sum().backward()
    for name, parameter in net.named_parameters():
        if noise == "sde" and name.startswith("head"):
            continue
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        place = int(gradient.abs().argmax())
        step = 1e-6
        values = []
        for shift in (step, -2 * step):
            flat[place] += shift
            with torch.no_grad():
                values.append((flow.score(field, config, sampled)[0] * weights).sum())
        flat[place] += step
        torch.testing.assert_close(
            (values[0] - values[1]) / (2 * step), gradient[place], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_a_histogram_of_one_step_is_its_density(noise):
    """Many draws from one beginning, of numbers of one dimension."""
    config = FlowConfig(steps=4, noise=noise, drawn="all")
    count = 8_000
    point, time_B = torch.full((1, 1, 1), 0.4), torch.full((1,), 0.5)
    velocity, log_width = exact_field(point, time_B)
    mean, log_std = flow.transition(point, velocity, time_B, config, log_width)
    sampled, _ = flow.draw(exact_field, config, range(count), (1, 1), CPU, [0] * count)
    assert (sampled[PATH][:, 0] == sampled[PATH][0, 0]).all()
    first = sampled[PATH][:, 1, 0, 0]
    start_B = torch.ones(1)
    velocity, log_width = exact_field(sampled[PATH][:1, 0], start_B)
    mean, log_std = flow.transition(sampled[PATH][:1, 0], velocity, start_B, config, log_width)
    edges = mean.item() + log_std.exp().item() * torch.linspace(-2.5, 2.5, 21)
    shares = torch.histogram(first, edges).hist / count
    centres = (edges[:-1] + edges[1:]) / 2
    path = torch.stack([sampled[PATH][:1, 0, 0, 0].expand(20), centres], 1)[..., None, None]
    one = FlowConfig(steps=4, noise=noise, drawn="one")
    padded = torch.cat([path, torch.zeros(20, 3, 1, 1)], 1)
    log_probs, _ = flow.score(exact_field, one, {PATH: padded, STEPS: torch.zeros(20, 1, dtype=torch.long)})
    density = log_probs[:, 0, 0].exp() * (edges[1] - edges[0])
    assert (shares - density).abs().max() < 0.014


def test_the_sde_keeps_the_marginals_of_the_ode():
    """However noisy its steps are, its actions are distributed as the flow's."""
    count = 4_000
    for config in (FlowConfig(steps=50, level=0.5, drawn="all"), FlowConfig(steps=50, drawn="one")):
        sampled, _ = flow.draw(exact_field, config, range(count), (1, 1), CPU, range(count, 2 * count))
        actions = sampled[PATH][:, -1, 0, 0]
        assert abs(actions.mean().item() - MEAN) < 0.02 and abs(actions.std().item() - WIDTH) < 0.03
        edges = MEAN + WIDTH * torch.linspace(-3, 3, 25)
        centres, size = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
        wanted = torch.distributions.Normal(MEAN, WIDTH).log_prob(centres).exp() * size
        assert (torch.histogram(actions, edges).hist / count - wanted).abs().max() < 0.025


def test_without_seeds_the_path_is_the_odes_and_nothing_is_scored():
    config = FlowConfig(steps=50)
    sampled, log_probs = flow.draw(exact_field, config, None, (2, 1), CPU, [1, 2])
    assert sampled[STEPS].shape == (2, 0) and not log_probs.any()
    path = sampled[PATH]
    for step in range(50):
        velocity, _ = exact_field(path[:, step], torch.full((2,), 1 - step / 50))
        torch.testing.assert_close(path[:, step + 1], path[:, step] - velocity / 50)
    # The flow of Gaussians is affine: a point of the noise goes to MEAN + WIDTH times itself.
    torch.testing.assert_close(path[:, -1], MEAN + WIDTH * path[:, 0], rtol=0, atol=0.03)


def test_a_row_depends_on_its_own_seed_alone():
    config = FlowConfig(steps=5)
    together, _ = flow.draw(exact_field, config, [3, 4, 5], (2, 2), CPU, [3, 4, 5])
    alone, _ = flow.draw(exact_field, config, [4], (2, 2), CPU, [4])
    torch.testing.assert_close(together[PATH][1:2], alone[PATH])
    assert torch.equal(together[STEPS][1:2], alone[STEPS])
    steps, _ = flow.draw(exact_field, config, range(500), (1, 1), CPU, range(500))
    assert torch.bincount(steps[STEPS][:, 0], minlength=5).min() > 60


def test_learned_widths_stay_in_their_bounds():
    head = NoiseHead(4, 2, FlowConfig(noise="learned", width=(0.05, 0.2)))
    widths = head(torch.randn(100, 4) * 1e3).exp()
    assert widths.min() >= 0.0499 and widths.max() <= 0.2001
    with pytest.raises(ValidationError, match="0 < least <= greatest"):
        FlowConfig(width=(0.2, 0.1))
    with pytest.raises(ValueError, match="log-widths"):
        point = torch.zeros(1, 1, 1)
        flow.transition(point, point, torch.ones(1), FlowConfig(noise="learned"), None)
