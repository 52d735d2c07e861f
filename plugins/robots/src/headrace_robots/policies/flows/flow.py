"""Log-probs for flow-matching policies: a path of denoising steps of which some, or all, are drawn (πRL, 2510.25889).

Time goes from 1 (noise) to 0 (action) in K equal steps; a field gives the velocity noise - action at a point and time.
Flow-SDE turns the ODE into an SDE with the same marginals; Flow-Noise adds noise of a learned width to the ODE's
steps; Flow-CPS turns a part of the noise that a step keeps into new noise. Facts of them are from RLinf
`rlinf/models/embodiment/openpi/openpi_action_model.py` at 016c55e.
Shapes as in `paths`. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field, model_validator
from torch import Tensor, nn

from headrace_robots.policies import paths
from headrace_robots.policies.paths import Transition

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


def draw(
    field: VelocityField,
    config: FlowConfig,
    seeds: Sequence[int] | None,
    shape: tuple[int, int],
    device: torch.device,
    starts: Sequence[int],
) -> tuple[dict[str, Tensor], Tensor]:
    """`paths.draw` of a flow: without seeds, and in steps that are not drawn, it follows the ODE."""
    candidates = range(config.candidates)
    drawn_BM = paths.drawn_steps(candidates, len(starts), seeds, every=config.drawn == "all").to(device)
    return paths.draw(_transition(field, config), config.steps, drawn_BM, seeds, starts, shape)


def score(field: VelocityField, config: FlowConfig, sampled: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`paths.score` of a flow."""
    return paths.score(_transition(field, config), sampled)


def _transition(field: VelocityField, config: FlowConfig) -> Transition:
    def step(point: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time_B = 1 - step_B / config.steps
        velocity, log_width = field(point, time_B)
        mean, log_std = transition(point, velocity, time_B, config, log_width)
        return point - velocity / config.steps, mean, log_std

    return step


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
