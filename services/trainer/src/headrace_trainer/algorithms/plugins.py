"""The built-in algorithms with their options. Knows no torch: names and options are asked for before a run starts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from headrace_schema.workflow import MOST_WORDS
from headrace_servicekit.registry import Plugin
from pydantic import Field, PositiveFloat, model_validator

from headrace_trainer.algorithms.options import (
    REFILLS,
    AggregationOptions,
    BelowOne,
    KlRewardOptions,
    NotNegative,
    Refills,
)

# Algorithms, third parties' too, import these from here.
from headrace_trainer.algorithms.options import Aggregation as Aggregation
from headrace_trainer.algorithms.options import ClipOptions as ClipOptions
from headrace_trainer.algorithms.options import Count as Count
from headrace_trainer.algorithms.options import GroupOptions as GroupOptions
from headrace_trainer.algorithms.options import PolicyOptions as PolicyOptions
from headrace_trainer.algorithms.options import StdOptions as StdOptions


class PpoOptions(ClipOptions, AggregationOptions):
    """Those with PPO's clip whose aggregation is open."""


class DistillOptions(PpoOptions):
    """`algorithm.options` of distill."""

    top_k: Annotated[int, Field(ge=0, le=MOST_WORDS)] = Field(
        default=0,
        description="the KL to the teacher over so many words that it finds likeliest at each token, and over the rest "
        "as one, computed beside the rollout's engine; 0: the log-prob of the sampled token alone, by the trainer",
    )
    direction: Literal["reverse", "forward"] = Field(
        default="reverse",
        description="of that KL: reverse, policy to teacher; forward, teacher to policy; needs top_k",
    )


class GroupPpoOptions(PpoOptions, GroupOptions):
    """`algorithm.options` of opo."""


class GrpoOptions(PpoOptions, StdOptions):
    """`algorithm.options` of grpo and passk_grpo."""


class RewardedOptions(PpoOptions, KlRewardOptions):
    """`algorithm.options` of reinforce and remax; those of ppo and reinforce_pp begin with them."""


class GroupRewardedOptions(RewardedOptions, GroupOptions):
    """`algorithm.options` of rloo and reinforce_pp_baseline."""


class DrGrpoOptions(ClipOptions, GroupOptions):
    """`algorithm.options` of dr_grpo."""

    norm_length: Count = Field(
        default=1,
        description="constant that each answer's sum is divided by, such as sampling.max_new_tokens",
    )


class DapoOptions(ClipOptions, StdOptions):
    """`algorithm.options` of dapo."""

    clip_high: NotNegative = Field(default=0.28, description="the ratio is clipped above 1 + clip_high")
    drop_equal: bool = Field(
        default=True, description="drop a group whose rewards are all equal; it counts as no failure"
    )
    max_refill: Refills = Field(default=3, description=REFILLS)
    overlong_buffer: Count | None = Field(
        default=None,
        description="last tokens before sampling.max_new_tokens over which a reward sinks; none: rewards as they are",
    )
    overlong_factor: PositiveFloat = Field(
        default=1.0, description="what the longest answers lose; needs overlong_buffer"
    )

    @model_validator(mode="after")
    def _shaped(self) -> Self:
        if self.overlong_buffer is None and "overlong_factor" in self.model_fields_set:
            raise ValueError(
                "overlong_factor: has no effect without overlong_buffer; set that too, or leave it out"
            )
        return self


class ReinforcePpOptions(RewardedOptions):
    """`algorithm.options` of reinforce_pp."""

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="discount of the reward from token to token"
    )


class ActorCriticOptions(RewardedOptions):
    """`algorithm.options` of ppo."""

    ratio_options: ClassVar[frozenset[str]] = RewardedOptions.ratio_options | {"value_clip"}
    kl_reward_by_token: ClassVar[bool] = True

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="discount of the reward from token to token"
    )
    lam: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="GAE's lambda: 1 trusts the rewards, 0 the next token's value"
    )
    whiten: bool = Field(default=True, description="whiten advantages over the batch's trained tokens")
    critic: Literal["head", "model"] = Field(
        default="head", description="a value head on the policy's last hidden states, or a model of its own"
    )
    critic_path: str | None = Field(
        default=None, description="model that a critic of its own begins as; none: same as policy"
    )
    critic_lr: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None, description="learning rate of the critic's own weights; none: optimizer.lr"
    )
    critic_warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="first steps of the run in which the critic's own weights learn alone"
    )
    value_coefficient: PositiveFloat = Field(
        default=0.5, description="weight of the value loss beside the policy's"
    )
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="values are clipped to this distance from the old ones; none: no clipping"
    )
    value_huber: PositiveFloat | None = Field(
        default=None, description="beyond this error the value loss is linear; none: squared everywhere"
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="an answer cut by the length limit goes on, by the critic's value of its end",
    )

    @model_validator(mode="after")
    def _has_model(self) -> Self:
        if self.critic == "head" and self.critic_path is not None:
            raise ValueError(
                "critic_path: a value head reads the policy's own hidden states; leave it out, or set critic: model"
            )
        return self


class GspoOptions(GrpoOptions):
    """`algorithm.options` of gspo."""

    loss_aggregation: Aggregation = Field(
        default="seq-mean-token-mean", description="what tokens and sequences weigh in the loss"
    )
    clip_low: BelowOne = Field(default=3e-4, description="the answer's ratio is clipped below 1 - clip_low")
    clip_high: NotNegative = Field(
        default=4e-4, description="the answer's ratio is clipped above 1 + clip_high"
    )


class GmpoOptions(StdOptions):
    """`algorithm.options` of gmpo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high"})

    clip_low: NotNegative = Field(default=0.4, description="log-ratios are clipped below -clip_low")
    clip_high: NotNegative = Field(default=0.4, description="log-ratios are clipped above clip_high")


class CispoOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of cispo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high"})

    clip_low: BelowOne | None = Field(
        default=None, description="a token's weight is at least 1 - clip_low; none: no such bound"
    )
    clip_high: NotNegative = Field(default=0.2, description="a token's weight is at most 1 + clip_high")


class SapoOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of sapo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"tau_positive", "tau_negative"})

    loss_aggregation: Aggregation = Field(
        default="seq-mean-token-mean", description="what tokens and sequences weigh in the loss"
    )
    tau_positive: PositiveFloat = Field(
        default=1.0, description="how sharply the gate closes where the advantage is positive"
    )
    tau_negative: PositiveFloat = Field(
        default=1.05, description="how sharply the gate closes where the advantage is negative"
    )


class GpgOptions(AggregationOptions, GroupOptions):
    """`algorithm.options` of gpg."""

    has_ratio: ClassVar[bool] = False

    alpha: PositiveFloat | None = Field(
        default=None,
        description="scale of advantages; none: samples of the step over those whose reward is not 0",
    )


class ClipCovOptions(GrpoOptions):
    """`algorithm.options` of clip_cov."""

    cov_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="share of the step's tokens that are drawn, at least one token"
    )
    cov_low: float = Field(default=1.0, description="tokens are drawn from those of higher covariance")
    cov_high: float = Field(default=5.0, description="tokens are drawn from those of lower covariance")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low: {self.cov_low} is not below cov_high: {self.cov_high}")
        return self


class KlCovOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of kl_cov."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"cov_fraction", "cov_coef"})

    cov_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="share of the step's tokens that pay, those of highest covariance"
    )
    cov_coef: NotNegative = Field(
        default=1.0, description="what such a token pays for its distance from the old policy"
    )


_HERE = "headrace_trainer.algorithms"
OFF_POLICY = ("off_policy",)
"""Feature of an algorithm that may learn from samples of older versions: its loss corrects for them."""


def _off_policy(where: str, options: type[PolicyOptions], description: str) -> Plugin:
    return Plugin(f"{_HERE}.{where}", options, description, features=OFF_POLICY)


GRPO = _off_policy("group_relative:Grpo", GrpoOptions, "group relative policy optimisation, without a critic")
PASSK_GRPO = _off_policy(
    "group_relative:PassKGrpo", GrpoOptions, "GRPO that rewards the best answer of a group alone"
)
DR_GRPO = _off_policy(
    "group_relative:DrGrpo",
    DrGrpoOptions,
    "GRPO without its biases by answer length and by spread of rewards",
)
DAPO = _off_policy(
    "group_relative:Dapo",
    DapoOptions,
    "GRPO with clip-higher, token mean, dynamic sampling and overlong shaping",
)
RLOO = _off_policy("reinforce:Rloo", GroupRewardedOptions, "a reward against the mean of its group's others")
OPO = Plugin(f"{_HERE}.reinforce:Opo", GroupPpoOptions, "a reward against its group's mean by answer length")
REINFORCE_PP = _off_policy(
    "reinforce:ReinforcePp", ReinforcePpOptions, "returns whitened over the batch, without groups"
)
REINFORCE_PP_BASELINE = _off_policy(
    "reinforce:ReinforcePpBaseline", GroupRewardedOptions, "group-centred rewards whitened over the batch"
)
PPO = _off_policy(
    "ppo:Ppo", ActorCriticOptions, "generalised advantages of a critic: a value head or a model of its own"
)
GSPO = _off_policy("group_relative:Gspo", GspoOptions, "GRPO with one ratio for each answer")
GMPO = _off_policy(
    "group_relative:Gmpo", GmpoOptions, "GRPO with the geometric mean of an answer's clipped ratios"
)
CISPO = _off_policy(
    "group_relative:Cispo", CispoOptions, "GRPO whose clip bounds a token's weight, not its gradient"
)
SAPO = _off_policy("group_relative:Sapo", SapoOptions, "GRPO with a soft gate in place of the clip")
GPG = _off_policy("reinforce:Gpg", GpgOptions, "group-centred rewards without a ratio and a clip")
REINFORCE = _off_policy("reinforce:Reinforce", RewardedOptions, "raw rewards, without a baseline")
REMAX = _off_policy("reinforce:Remax", RewardedOptions, "a reward against that of the prompt's greedy answer")
DISTILL = _off_policy(
    "distill:Distill", DistillOptions, "on-policy distillation from the teacher trainer.reference"
)
CLIP_COV = _off_policy(
    "group_relative:ClipCov", ClipCovOptions, "GRPO without a few tokens of high covariance"
)
KL_COV = _off_policy(
    "group_relative:KlCov", KlCovOptions, "GRPO whose tokens of highest covariance stay near the old policy"
)
