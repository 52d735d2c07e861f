"""Log-probs for flow-matching policies: a path of denoising steps of which some, or all, are drawn (πRL, 2510.25889).

Time goes from 1 (noise) to 0 (action) in K equal steps; a field gives the velocity noise - action at a point and time.
Flow-SDE turns the ODE into an SDE with the same marginals; Flow-Noise adds noise of a learned width to the ODE's
steps; Flow-CPS turns a part of the noise that a step keeps into new noise. The noise that a path begins with is not
scored: it depends on no weight. Facts of them are from RLinf
`rlinf/models/embodiment/openpi/openpi_action_model.py` at 016c55e.
Shapes: B environments, H × W numbers of a horizon of actions, K steps, M steps that were drawn. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field, model_validator
from torch import Tensor, nn

from headrace_modelkit.robot import gaussian

PATH, STEPS = "path", "steps"
"""Entries of `ActionChunk.sampled`: (B, K + 1, H, W) points of the path, and (B, M) which of its steps were drawn."""

VelocityField = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""((B, H, W) points, (B,) times) to velocities and, of Flow-Noise, log-widths; both (B, H, W)."""


class FlowConfig(Section):
    """How actions are drawn from a flow."""

    steps: Count = Field(default=10, description="denoising steps")
    noise: Literal["sde", "learned", "cps"] = Field(
        default="sde", description="Flow-SDE, Flow-Noise (learned), or Flow-CPS"
    )
    level: float = Field(
        default=0.5, gt=0, le=2, description="of Flow-SDE and Flow-CPS (there less than 1): noise of a step"
    )
    width: tuple[float, float] = Field(
        default=(0.08, 0.16), description="of Flow-Noise: least and greatest width"
    )
    drawn: Literal["one", "all"] = Field(
        default="one", description="steps that are drawn: one, by chance, among ODE steps, or all"
    )
    ignore_last: bool = Field(
        default=False,
        description="never draw the last step, whose noise is the action's own (of Flow-CPS always so)",
    )

    @property
    def candidates(self) -> int:
        """How many steps, from the first on, may be drawn."""
        return self.steps - (self.ignore_last or self.noise == "cps")

    @model_validator(mode="after")
    def _possible(self) -> FlowConfig:
        if not self.candidates:
            raise ValueError(
                "steps is 1, and its last step is not drawn: give 2 or more, or draw the last one"
            )
        if self.noise == "cps" and self.level >= 1:
            raise ValueError(f"level is {self.level}: Flow-CPS takes a share below 1")
        return self

    @model_validator(mode="after")
    def _widths(self) -> FlowConfig:
        if not 0 < self.width[0] <= self.width[1]:
            raise ValueError(f"width is {self.width}: give 0 < least <= greatest")
        return self


class NoiseHead(nn.Module):
    """Flow-Noise's log-widths, from features of the field, between the configured bounds."""

    def __init__(self, features: int, numbers: int, config: FlowConfig) -> None:
        super().__init__()
        self.bounds = [math.log(width) for width in config.width]
        self.layers = nn.Sequential(
            *(nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, numbers))
        )

    def forward(self, features: Tensor) -> Tensor:
        low, high = self.bounds
        # Beside adapters it learns in fp32, and what gives the features computes in bf16.
        own = features.to(next(self.layers.parameters()).dtype)
        found: Tensor = low + (high - low) * (self.layers(own).tanh() + 1) / 2
        return found


@torch.no_grad()
def draw(
    field: VelocityField,
    config: FlowConfig,
    seeds: Sequence[int] | None,
    shape: tuple[int, int],
    device: torch.device,
    starts: Sequence[int],
) -> tuple[dict[str, Tensor], Tensor]:
    """(PATH and STEPS of each environment, (B, H, W) log-probs summed over its drawn steps).

    `starts` seeds the noise that paths begin with, `seeds` the steps; None follows the ODE alone.
    """
    count, steps = len(starts), config.steps
    points = [gaussian.row_noise(starts, shape, device)]
    log_probs = torch.zeros_like(points[0])
    drawn_BM = _drawn_steps(config, count, seeds).to(device)
    noise = (
        None
        if seeds is None
        else gaussian.row_noise([_mixed(seed, 1) for seed in seeds], (steps, *shape), device)
    )
    for step in range(steps):
        time_B = _times(torch.full((count,), step, device=device), config)
        velocity, log_width = field(points[-1], time_B)
        following = points[-1] - velocity / steps
        if noise is not None:
            mean, log_std = transition(points[-1], velocity, time_B, config, log_width)
            sample = mean + log_std.exp() * noise[:, step]
            chosen = (drawn_BM == step).any(1)[:, None, None]
            following = torch.where(chosen, sample, following)
            density = gaussian.log_density(sample, mean, log_std)
            log_probs = log_probs + torch.where(chosen, density, torch.zeros_like(density))
        points.append(following)
    return {PATH: torch.stack(points, 1), STEPS: drawn_BM}, log_probs


def score(field: VelocityField, config: FlowConfig, sampled: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(B, H, W) log-probs and entropies of a path's drawn steps, summed over them; differentiable."""
    path, drawn_BM = sampled[PATH], sampled[STEPS]
    rows = torch.arange(len(path), device=path.device)
    log_probs = torch.zeros_like(path[:, 0])
    entropies = torch.zeros_like(path[:, 0])
    for step_B in drawn_BM.unbind(1):
        point, following = path[rows, step_B], path[rows, step_B + 1]
        time_B = _times(step_B, config)
        velocity, log_width = field(point, time_B)
        mean, log_std = transition(point, velocity, time_B, config, log_width)
        log_probs = log_probs + gaussian.log_density(following, mean, log_std)
        entropies = entropies + gaussian.entropy(log_std).expand_as(mean)
    return log_probs, entropies


def transition(
    point: Tensor, velocity: Tensor, time_B: Tensor, config: FlowConfig, log_width: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean and log-width of the next point, (B, H, W).

    Flow-SDE: with d = 1 / K, s^2 = level^2 t / (1 - t), and the noise e = x + (1 - t) v that x is thought to come
    from, the mean is x - v d - e s^2 d / (2 t), the width s sqrt(d). At t = 1, where s has no bound, 1 - t is d (for
    K = 1: 1). Flow-Noise: the mean is the ODE's. Flow-CPS: with an angle of level quarter turns, the mean keeps its
    cosine of the noise that the ODE would keep, and the width is the sine of it.
    Raises ValueError when Flow-Noise is given no widths.
    """
    delta = 1 / config.steps
    following = point - velocity * delta
    if config.noise == "learned":
        if log_width is None:
            raise ValueError("Flow-Noise needs a field that gives log-widths")
        return following, log_width
    time = time_B[:, None, None]
    noise = point + (1 - time) * velocity
    if config.noise == "cps":
        angle, kept = config.level * math.pi / 2, time - delta
        mean = (point - time * velocity) * (1 - kept) + noise * kept * math.cos(angle)
        return mean, (kept * math.sin(angle)).log().expand_as(mean)
    variance = config.level**2 * time / (1 - time).clamp(min=delta)
    mean = following - noise * variance * delta / (2 * time)
    return mean, (0.5 * (variance * delta).log()).expand_as(mean)


def _times(step_B: Tensor, config: FlowConfig) -> Tensor:
    """fp32 times of steps, rounded alike in drawing and in scoring."""
    return 1 - step_B / config.steps


def _drawn_steps(config: FlowConfig, count: int, seeds: Sequence[int] | None) -> Tensor:
    if seeds is None:
        return torch.zeros(count, 0, dtype=torch.long)
    if config.drawn == "all":
        return torch.arange(config.candidates).expand(count, -1)
    uniform_B1 = gaussian.row_uniform([_mixed(seed, 2) for seed in seeds], (1,), torch.device("cpu"))
    return (uniform_B1 * config.candidates).long()


def _mixed(seed: int, stream: int) -> int:
    """Another seed for each stream of an environment's numbers (splitmix64's finaliser)."""
    mixed = (int(seed) + stream * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
