"""Running mean and variance of observations, as a part of the policy's weights.

Shapes: N observations, and any shape of one. Its buffers are persistent: they travel in a version's manifest and are
in its digest. A forward pass never changes them, so that a version stays itself while it generates.
"""

from __future__ import annotations

import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field
from torch import Tensor, nn


class NormalizerConfig(Section):
    """How observations are normalised."""

    clip: float = Field(default=5.0, gt=0, description="bound of a normalised number, in standard deviations")
    frozen_after: Count | None = Field(
        default=20, description="updates after which the statistics stay as they are; null: never"
    )
    centre: bool = Field(default=True, description="subtract the mean; false only divides (rewards)")


class Normalizer(nn.Module):
    """(x - mean) / sqrt(variance + 1e-8), clipped. Before the first update it changes nothing but by clipping."""

    mean: Tensor
    variance: Tensor
    count: Tensor
    updates: Tensor

    def __init__(self, shape: tuple[int, ...], config: NormalizerConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @property
    def frozen(self) -> bool:
        """Whether the statistics will never change again."""
        return self.config.frozen_after is not None and int(self.updates) >= self.config.frozen_after

    def freeze(self) -> None:
        """Ends the updates, as `frozen_after` of them do; without effect where that is null."""
        if self.config.frozen_after is not None:
            self.updates.fill_(self.config.frozen_after)

    def forward(self, values: Tensor) -> Tensor:
        """Normalised values in fp32, whatever batch dimensions come first."""
        mean = self.mean if self.config.centre else torch.zeros_like(self.mean)
        scaled = (values - mean.float()) / (self.variance + 1e-8).sqrt().float()
        return scaled.clamp(-self.config.clip, self.config.clip)

    @torch.no_grad()
    def update(self, values_N: Tensor) -> None:
        """Adds a batch of observations (N, …) to the statistics; call it when a version is committed, nowhere else.

        Frozen statistics, or an empty batch, stay as they are. Exact in any order and split of batches (Chan et al.
        1983), up to rounding in float64. Raises ValueError for another shape or numbers that are not finite.
        """
        if values_N.shape[1:] != self.mean.shape:
            raise ValueError(
                f"observations have shape {tuple(values_N.shape[1:])}, not {tuple(self.mean.shape)}"
            )
        if not bool(torch.isfinite(values_N).all()):
            raise ValueError("an observation is not finite; it would spoil the statistics for ever")
        if self.frozen or not len(values_N):
            return
        exact_N = values_N.double()
        before, added = int(self.count), len(exact_N)
        total = before + added
        shift = exact_N.mean(0) - self.mean
        squares = exact_N.var(0, correction=0) * added + (self.variance * before if before else 0.0)
        self.variance.copy_((squares + shift.square() * before * added / total) / total)
        self.mean.add_(shift * added / total)
        self.count.fill_(total)
        self.updates.add_(1)
