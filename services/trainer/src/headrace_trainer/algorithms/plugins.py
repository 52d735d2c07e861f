"""The built-in algorithms with their options. Knows no torch: names and options are asked for before a run starts."""

from __future__ import annotations

from typing import Annotated, Literal

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveFloat

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class PolicyOptions(Options):
    """What every policy-gradient algorithm takes."""

    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what tokens and sequences weigh in the loss"
    )
    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the truncated importance weight trainer/engine per token; none: no correction",
    )


class ClipOptions(PolicyOptions):
    """Those whose objective clips the ratio of new to old policy."""

    clip_low: BelowOne = Field(default=0.2, description="the ratio is clipped below 1 - clip_low")
    clip_high: Annotated[float, Field(ge=0)] = Field(
        default=0.2, description="the ratio is clipped above 1 + clip_high"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="bound of the ratio where the advantage is negative; none: no bound"
    )


class GrpoOptions(ClipOptions):
    """`algorithm.options` of grpo."""

    normalize_std: bool = Field(
        default=True, description="divide group-centred rewards by their standard deviation"
    )


GRPO = Plugin(
    "headrace_trainer.algorithms.grpo:Grpo",
    GrpoOptions,
    "group relative policy optimisation, without a critic",
)
