"""From the numbers that a policy draws, -1 to 1, to those that an environment takes. Knows no policy.

Shapes: A numbers of an action; any dimensions before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from headrace_schema.sections.base import Section
from pydantic import Field, model_validator
from torch import Tensor, nn


class ActionBounds(Section):
    """What -1 and 1 stand for, number by number; null in both leaves a number as it was drawn.

    The bounds of an action space, the 1% and 99% quantiles of a data set (OpenVLA's `norm_stats`), or its mean less and
    plus a standard deviation, which normalises by mean and deviation; numbers that may lie beyond want `clip: false`.
    """

    low: tuple[float | None, ...] = Field(description="what -1 stands for")
    high: tuple[float | None, ...] = Field(description="what 1 stands for")
    clip: bool | tuple[float, float] = Field(
        default=True,
        description="keep actions between low and high; false: they may lie beyond; two numbers: between those, in the "
        "environment's units",
    )

    @model_validator(mode="after")
    def _pairs(self) -> ActionBounds:
        if len(self.low) != len(self.high) or not self.low:
            raise ValueError(
                f"low has {len(self.low)} numbers and high {len(self.high)}: give one pair a number"
            )
        for place, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if (low is None) != (high is None) or (low is not None and high is not None and low > high):
                raise ValueError(f"bounds {place} are {low} and {high}: give low <= high, or null for both")
        return self

    @property
    def size(self) -> int:
        """A."""
        return len(self.low)

    @classmethod
    def unit(cls, size: int) -> ActionBounds:
        """-1 to 1 for each of `size` numbers."""
        return cls(low=(-1.0,) * size, high=(1.0,) * size)

    @classmethod
    def of_statistics(
        cls, low: Sequence[float], high: Sequence[float], mask: Sequence[bool] | None = None
    ) -> ActionBounds:
        """Bounds of a data set's quantiles; numbers outside the mask (a gripper) stay as they are drawn."""
        kept = [True] * len(low) if mask is None else list(mask)
        return cls(
            low=tuple(value if keep else None for value, keep in zip(low, kept, strict=True)),
            high=tuple(value if keep else None for value, keep in zip(high, kept, strict=True)),
        )


class ActionScaling(nn.Module):
    """Un-normalises actions by fixed bounds. Not among the weights: it is a part of the policy's configuration."""

    low_A: Tensor
    width_A: Tensor
    mask_A: Tensor
    least_A: Tensor
    most_A: Tensor

    def __init__(self, bounds: ActionBounds) -> None:
        super().__init__()
        self.clip = bounds.clip
        low, high = _filled(bounds.low, -1.0), _filled(bounds.high, 1.0)
        self.register_buffer("low_A", low.float(), persistent=False)
        # In fp64: numbers that hardly differ have a width for all that.
        self.register_buffer("width_A", (high - low).float(), persistent=False)
        self.register_buffer("least_A", _inside(bounds.low, up=True), persistent=False)
        self.register_buffer("most_A", _inside(bounds.high, up=False), persistent=False)
        self.register_buffer(
            "mask_A", torch.tensor([low is not None for low in bounds.low]), persistent=False
        )

    def forward(self, drawn: Tensor) -> Tensor:
        """What the environment is given: clipped to -1 to 1, unless the bounds say otherwise, and scaled where there
        are bounds.
        """
        if self.clip is not True:
            free = torch.where(self.mask_A, 0.5 * (drawn + 1) * self.width_A + self.low_A, drawn)
            return free.clamp(*self.clip) if self.clip else free
        scaled = 0.5 * (drawn.clamp(-1, 1) + 1) * self.width_A + self.low_A
        # Rounding may leave the bounds, and an environment refuses what is outside by one bit.
        inside = torch.minimum(torch.maximum(scaled, self.least_A), self.most_A)
        return torch.where(self.mask_A, inside, drawn)

    def drawn(self, executed: Tensor) -> Tensor:
        """Undoes `forward` for actions inside the bounds, such as those of demonstrations.

        A number whose bounds are equal is 0.
        """
        width_A = self.width_A
        unit = 2 * (executed - self.low_A) / torch.where(width_A == 0, torch.ones_like(width_A), width_A) - 1
        return torch.where(self.mask_A, torch.where(width_A == 0, torch.zeros_like(unit), unit), executed)


def _filled(bounds: Sequence[float | None], missing: float) -> Tensor:
    return torch.tensor([missing if bound is None else bound for bound in bounds], dtype=torch.float64)


def _inside(bounds: Sequence[float | None], *, up: bool) -> Tensor:
    """Bounds in fp32, rounded to the inside."""
    exact = torch.tensor([0.0 if bound is None else bound for bound in bounds], dtype=torch.float64)
    rounded = exact.float()
    outside = rounded.double() < exact if up else rounded.double() > exact
    towards = torch.full_like(rounded, float("inf") if up else float("-inf"))
    return torch.where(outside, torch.nextafter(rounded, towards), rounded)
