"""Algorithms of answers that the data gives, with their options. Knows no torch, as `plugins`."""

from __future__ import annotations

from typing import Annotated, Literal

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveFloat

from headrace_trainer.algorithms.options import Aggregation, NotNegative

_HERE = "headrace_trainer.algorithms"


class GivenOptions(Options):
    """What every algorithm of given answers takes."""

    turns: Literal["all", "last"] = Field(
        default="last",
        description="which of the assistant's turns are learned from: all but those that have `weight: 0`, or the last",
    )


class SftOptions(GivenOptions):
    """`algorithm.options` of sft."""

    turns: Literal["all", "last"] = Field(
        default="all",
        description="which of the assistant's turns are learned from: all but those that have "
        "`weight: 0`, or the last",
    )
    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what tokens and answers weigh in the loss"
    )


class PairOptions(GivenOptions):
    """Those of every comparison."""

    beta: PositiveFloat = Field(
        default=0.1,
        description="how many nats a reward is worth: the reward of an answer is beta times its log-ratio",
    )


class DpoOptions(PairOptions):
    """`algorithm.options` of dpo."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="share of pairs that are taken to be labelled the wrong way round (cDPO)"
    )


class SimpoOptions(PairOptions):
    """`algorithm.options` of simpo."""

    beta: PositiveFloat = Field(
        default=2.0, description="the reward of an answer is beta times its mean log-prob"
    )
    gamma: NotNegative = Field(default=1.0, description="margin of the rewards that is asked for")


class OrpoOptions(PairOptions):
    """`algorithm.options` of orpo."""

    beta: PositiveFloat = Field(
        default=0.1, description="weight of the odds ratio beside the likelihood of the chosen answer"
    )


class KtoOptions(PairOptions):
    """`algorithm.options` of kto."""

    desirable_weight: PositiveFloat = Field(default=1.0, description="weight of good answers")
    undesirable_weight: PositiveFloat = Field(default=1.0, description="weight of bad answers")


class JudgeOptions(Options):
    """Those of what learns a scalar head."""

    head_lr: PositiveFloat | None = Field(
        default=None, description="learning rate of the head, which begins at 0; default: optimizer.lr"
    )


class BradleyTerryOptions(JudgeOptions):
    """`algorithm.options` of bradley_terry."""

    center_coef: NotNegative = Field(
        default=0.0, description="weight of the squared sum of a pair's rewards, which draws rewards to 0"
    )


class PrmOptions(JudgeOptions):
    """`algorithm.options` of prm."""

    separator: str = Field(
        default="\n\n", min_length=1, description="what stands between two steps: the scorer's `separator`"
    )


SFT = Plugin(f"{_HERE}.supervised:Sft", SftOptions, "the likelihood of given answers (workflow: supervised)")
DPO = Plugin(
    f"{_HERE}.preference:Dpo", DpoOptions, "direct preference optimisation of pairs (workflow: preference)"
)
IPO = Plugin(
    f"{_HERE}.preference:Ipo", PairOptions, "DPO's margin drawn to a fixed distance (workflow: preference)"
)
SIMPO = Plugin(
    f"{_HERE}.preference:Simpo",
    SimpoOptions,
    "pairs by mean log-probs, without a reference (workflow: preference)",
)
ORPO = Plugin(
    f"{_HERE}.preference:Orpo",
    OrpoOptions,
    "likelihood with an odds ratio, without a reference (workflow: preference)",
)
BRADLEY_TERRY = Plugin(
    f"{_HERE}.judging:BradleyTerry", BradleyTerryOptions, "a reward model of pairs (workflow: reward_model)"
)
PRM = Plugin(
    f"{_HERE}.judging:Prm",
    PrmOptions,
    "a reward model of steps that are labelled good or bad (workflow: reward_model)",
)
KTO = Plugin(
    f"{_HERE}.preference:Kto",
    KtoOptions,
    "single answers that are labelled good or bad (workflow: preference)",
)
SESSION = Plugin(
    f"{_HERE}.asked:AskedLosses",
    Options,
    "the losses that a loop of the user's own asks for (workflow: session)",
)
