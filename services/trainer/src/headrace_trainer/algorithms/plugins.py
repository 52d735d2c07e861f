"""The built-in algorithms with their options. Knows no torch: names and options are asked for before a run starts."""

from __future__ import annotations

from typing import Literal

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveFloat

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


class GrpoOptions(Options):
    """`algorithm.options` of grpo."""

    normalize_std: bool = Field(
        default=True, description="divide group-centred rewards by their standard deviation"
    )
    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what tokens and sequences weigh in the loss"
    )
    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the truncated importance weight trainer/engine per token; none: no correction",
    )


GRPO = Plugin(
    "headrace_trainer.algorithms.grpo:Grpo",
    GrpoOptions,
    "group relative policy optimisation, without a critic",
)
