"""Diagonal Gaussians, and noise that depends on an environment's own seed alone. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def log_density(values: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of each number, differentiable in mean and log-std; shapes broadcast."""
    return -0.5 * ((values - mean) * (-log_std).exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def entropy(log_std: Tensor) -> Tensor:
    """Entropy of each number in nats."""
    return log_std + 0.5 * math.log(2 * math.pi * math.e)


def row_noise(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(B, *shape) standard normal numbers in fp32, the rows drawn on the CPU from their own seeds."""
    return _rows(seeds, lambda generator: torch.randn(shape, generator=generator), shape, device)


def row_uniform(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(B, *shape) numbers in [0, 1), in fp64, so that no probability is too small to be drawn; rows as `row_noise`."""
    return _rows(
        seeds, lambda generator: torch.rand(shape, generator=generator, dtype=torch.float64), shape, device
    )


def _rows(
    seeds: Sequence[int],
    draw: Callable[[torch.Generator], Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    generator = torch.Generator()
    rows = [draw(generator.manual_seed(int(seed))) for seed in seeds]
    return (torch.stack(rows) if rows else torch.zeros(0, *shape)).to(device)
