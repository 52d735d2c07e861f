"""The built-in algorithms with their options. Knows no torch: names and options are asked for before a run starts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveFloat, model_validator

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
Count = Annotated[int, Field(ge=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class PolicyOptions(Options):
    """What every policy-gradient algorithm takes. An option that the others leave without effect is refused."""

    ratio_options: ClassVar[frozenset[str]] = frozenset()
    """Options that act on the ratio of new to old policy only."""

    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what tokens and sequences weigh in the loss"
    )
    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the truncated importance weight trainer/engine per token; none: no correction",
    )
    epochs: Count = Field(default=1, description="passes over the step's batch")
    minibatches: Count = Field(
        default=1, description="optimizer steps of a pass, each from its share of the groups"
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="after the first pass, no optimizer step follows a minibatch whose approx_kl is above this",
    )

    @model_validator(mode="after")
    def _used(self) -> Self:
        idle = sorted(self.model_fields_set & self.ratio_options)
        if self.epochs * self.minibatches == 1 and idle:
            raise ValueError(
                f"{idle[0]}: with one optimizer step a commit the ratio to the old policy is 1, and {', '.join(idle)} "
                "would have no effect; leave it out, or set epochs or minibatches to 2 or more"
            )
        if self.epochs == 1 and self.target_kl is not None:
            raise ValueError(
                "target_kl: has no effect in the first pass; leave it out, or set epochs to 2 or more"
            )
        return self


class ClipOptions(PolicyOptions):
    """Those whose objective clips the ratio of new to old policy."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high", "dual_clip"})

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
