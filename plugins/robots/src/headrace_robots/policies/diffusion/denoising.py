"""Steps from noise to actions of a diffusion model, drawn with log-probs (DPPO, 2409.00588). Knows no model.

A point of the path at training step t is sqrt(a_t) action + sqrt(1 - a_t) noise, with a_t the product of 1 - beta. A
step goes to a_s of an earlier s, the last one to a = 1. Facts of the steps are diffusers' `DDPMScheduler` and
`DDIMScheduler` as LeRobot makes them. Shapes as in `paths`; K steps of a path, N training steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field, model_validator
from torch import Tensor, nn

from headrace_robots.policies.gaussian import row_uniform
from headrace_robots.policies.paths import Transition, drawn_steps

Prediction = Callable[[Tensor, Tensor], Tensor]
"""((B, H, W) points, (B,) training steps) to what the model predicts of them: their noise, or their actions."""


class DenoisingConfig(Section):
    """How actions are drawn."""

    steps: Count = Field(default=10, description="denoising steps")
    sampler: Literal["ddpm", "ddim"] = Field(
        default="ddim", description="ddpm: the posterior's mean and noise; ddim: a share eta of its noise"
    )
    eta: float = Field(default=1.0, ge=0, le=1, description="of ddim")
    least_width: float = Field(
        default=0.1, gt=0, description="of a drawn step, whose noise may be next to none (DPPO's floor)"
    )
    drawn: Literal["one", "all"] = Field(
        default="all",
        description="of the last steps: one, by chance, or all. The others follow ddim without noise",
    )
    last: Count | None = Field(default=None, description="how many of the last steps may be drawn; null: all")

    @model_validator(mode="after")
    def _fits(self) -> DenoisingConfig:
        if self.last is not None and self.last > self.steps:
            raise ValueError(f"last is {self.last}, and there are {self.steps} steps")
        return self

    @property
    def candidates(self) -> range:
        """The steps that may be drawn."""
        return range(self.steps - (self.last or self.steps), self.steps)


class ScheduleConfig(Section):
    """How noise was added in training; names as in LeRobot's config.json."""

    num_train_timesteps: Count = 100
    beta_schedule: Literal["squaredcos_cap_v2", "linear", "scaled_linear"] = "squaredcos_cap_v2"
    beta_start: float = Field(default=1e-4, gt=0, lt=1)
    beta_end: float = Field(default=0.02, gt=0, lt=1)
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = Field(default=1.0, gt=0)

    def kept(self) -> Tensor:
        """(N,) a_t in fp64: the share of an action's variance that is left at each training step."""
        count = self.num_train_timesteps
        if self.beta_schedule == "squaredcos_cap_v2":
            shares = torch.arange(count + 1, dtype=torch.float64) / count
            wave = ((shares + 0.008) / 1.008 * math.pi / 2).cos().square()
            beta = (1 - wave[1:] / wave[:-1]).clamp(max=0.999)
        elif self.beta_schedule == "linear":
            beta = torch.linspace(self.beta_start, self.beta_end, count, dtype=torch.float64)
        else:
            beta = torch.linspace(
                self.beta_start**0.5, self.beta_end**0.5, count, dtype=torch.float64
            ).square()
        return (1 - beta).cumprod(0)


def drawn_by(config: DenoisingConfig, seeds: Sequence[int], *, deterministic: bool) -> Tensor:
    """(B, M) steps of each environment that are drawn."""
    chosen = None if deterministic else seeds
    return drawn_steps(config.candidates, len(seeds), chosen, every=config.drawn == "all")


class Schedule(nn.Module):
    """What training and a path know of noise. Has no weights."""

    kept_N: Tensor
    times_K: Tensor
    before_K: Tensor

    def __init__(self, config: ScheduleConfig, denoising: DenoisingConfig) -> None:
        super().__init__()
        self.config, self.denoising = config, denoising
        kept_N = config.kept()
        stride = config.num_train_timesteps // denoising.steps
        times_K = torch.arange(denoising.steps).flip(0) * stride
        before_K = torch.where(times_K >= stride, kept_N[(times_K - stride).clamp(min=0)], 1.0)
        self.register_buffer("kept_N", kept_N.float(), persistent=False)
        self.register_buffer("times_K", times_K, persistent=False)
        self.register_buffer("before_K", before_K.float(), persistent=False)

    def times(self, seeds: Sequence[int]) -> Tensor:
        """(B,) training steps that imitation looks at, by each environment's seed."""
        uniform_B = row_uniform([seed + 1 for seed in seeds], (1,), torch.device("cpu"))[:, 0]
        return (uniform_B * self.config.num_train_timesteps).long()

    def noised(self, actions: Tensor, noise: Tensor, time_B: Tensor) -> Tensor:
        """(B, H, W) points at training steps."""
        kept = self.kept_N[time_B][:, None, None]
        return kept.sqrt() * actions + (1 - kept).sqrt() * noise

    def transition(self, predict: Prediction) -> Transition:
        """Of the path's steps: what a drawn one is around, and where it goes without noise (ddim with eta 0)."""
        config, denoising = self.config, self.denoising
        eta = 1.0 if denoising.sampler == "ddpm" else denoising.eta

        def step(point: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            time_B = self.times_K[step_B]
            kept, before = (each[:, None, None] for each in (self.kept_N[time_B], self.before_K[step_B]))
            clean = noise = predict(point, time_B)
            if config.prediction_type == "epsilon":
                clean = (point - (1 - kept).sqrt() * noise) / kept.sqrt()
            else:
                noise = (point - kept.sqrt() * clean) / (1 - kept).sqrt()
            if config.clip_sample:
                clean = clean.clamp(-config.clip_sample_range, config.clip_sample_range)
            if denoising.sampler == "ddpm":  # its mean is of the clipped actions and of the point
                noise = (point - kept.sqrt() * clean) / (1 - kept).sqrt()
            width = eta * ((1 - before) / (1 - kept) * (1 - kept / before)).clamp(min=0).sqrt()
            mean = before.sqrt() * clean + (1 - before - width.square()).clamp(min=0).sqrt() * noise
            following = before.sqrt() * clean + (1 - before).sqrt() * noise
            return following, mean, width.clamp(min=denoising.least_width).log().expand_as(mean)

        return step
